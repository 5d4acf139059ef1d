"""The action and the channel of docs/add_an_action.md, each in a copy of the package: few edits, and it runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patched_package import num_changed, patched_package
from tiers import tiers

ROOT = Path(__file__).parents[1]
PAGE = "docs/add_an_action.md"
# Heading of the change -> the most edits of files that were there, and the script of `added` that runs it.
CHANGES = {
    "An action with a transfer: PROBE": (12, "run_probe.py"),
    "A channel on the loop over layers: norms of layers": (4, "run_norms.py"),
}
RUNS = tiers(
    [],
    ci=[(heading, "1f1b") for heading in CHANGES],
    slow=[
        ("An action with a transfer: PROBE", "zb_h1"),
        ("A channel on the loop over layers: norms of layers", "zb_v"),
    ],
)


@pytest.mark.parametrize("heading", CHANGES)
def test_the_page_fits_the_package_and_needs_few_edits(heading, tmp_path):
    assert 0 < sum(num_changed(PAGE, heading=heading).values()) <= CHANGES[heading][0]
    patched_package(PAGE, tmp_path, heading=heading)


@pytest.mark.parametrize("case", RUNS, ids=": ".join)
def test_a_copy_of_the_package_runs_it(case, tmp_path):
    heading, schedule = case
    script = Path(__file__).parent / "added" / CHANGES[heading][1]
    folders = [patched_package(PAGE, tmp_path, heading=heading), ROOT / "tests", ROOT / "tests" / "program"]
    done = subprocess.run(
        [sys.executable, script, schedule],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
