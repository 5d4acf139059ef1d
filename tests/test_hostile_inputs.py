"""Every parser, given what nobody writes by hand: a short error in five parts, soon and in little memory."""

import json
import subprocess
import sys

import hostile_inputs
import pytest
from hostile_inputs import CASES, make_world, what_became


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


def test_the_table_is_long_and_its_names_differ():
    assert len(CASES) >= 300
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES[::9], ids=[case.name for case in CASES[::9]])
def test_a_hostile_input_is_a_short_error(case, world, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["jaxpipe"])
    assert what_became(case, world, tmp_path) == ""


@pytest.mark.slow
def test_all_of_them_under_limits_of_time_and_memory():
    done = subprocess.run(
        [sys.executable, hostile_inputs.__file__, "0", str(len(CASES))], capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}\n{done.stderr[-2000:]}"
    answers = {line["name"]: line["wrong"] for line in lines if "name" in line}
    assert answers == dict.fromkeys([case.name for case in CASES], "")
