"""Four steps compiled for A100s that are not there have the bytes and permutes in `tests/golden/compiled.json`.

A change that is meant writes them anew, with a line in CHANGELOG.md: `python tests/compile/test_unchanged.py`, minutes.
"""

import json
from pathlib import Path

import pytest
from compiling import compiled

pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")

GOLDEN = Path(__file__).parents[1] / "golden" / "compiled.json"
CASES = json.loads(GOLDEN.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bytes_and_permutes(case):
    numbers = compiled(*CASES[case]["arguments"])
    expected = CASES[case]["numbers"]
    assert {name: numbers[name] for name in expected} == expected


if __name__ == "__main__":
    for each in CASES.values():
        found = compiled(*each["arguments"])
        each["numbers"] = {name: found[name] for name in each["numbers"]}
    GOLDEN.write_text(json.dumps(CASES, indent=1) + "\n")
