"""Four steps compiled for A100s that are not there have the bytes and permutes of commit 33dd3c0."""

import json
from pathlib import Path

import pytest
from compiling import compiled

pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")

CASES = json.loads((Path(__file__).parents[1] / "golden" / "compiled.json").read_text())
QUICK = "LLaMA 65B, zb_v"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.ci if case == QUICK else pytest.mark.slow) for case in CASES]
)
def test_bytes_and_permutes(case):
    numbers = compiled(*CASES[case]["arguments"])
    expected = CASES[case]["numbers"]
    assert {name: numbers[name] for name in expected} == expected
