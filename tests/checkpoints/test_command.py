"""`python -m jaxpipe.checkpoints`: what a run has, and what is damaged; no arrays are read."""

import re

import pytest

from jaxpipe.checkpoints.command import main
from jaxpipe.checkpoints.files import CHECKPOINTS, About, unfinished_path
from jaxpipe.checkpoints.sums import SUMS, write_sums

CONFIG = {"checkpoint": {"keep_last": 1, "keep_every": 20, "keep_best": 1, "save_every": 10}}


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / CHECKPOINTS
    for step, loss in ((10, 1.5), (20, 2.0), (30, None)):
        (folder / str(step)).mkdir(parents=True)
        (folder / str(step) / "array").write_bytes(bytes(2**20))
        About(step, "2025-03-01T12:00:00+00:00", CONFIG, loss).write(folder / str(step))
        write_sums(folder / str(step))
    return tmp_path


def test_the_list(run, capsys):
    folder = run / CHECKPOINTS
    unfinished_path(folder, 40).mkdir()
    (folder / "20.damaged").mkdir()
    assert main(["list", str(run)]) == 0
    assert [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()] == [
        ["step", "complete", "MiB", "written (UTC)", "held-out loss", "kept because of"],
        ["10", "yes", "1.0", "2025-03-01T12:00:00", "1.5000", "best 1"],
        ["20", "yes", "1.0", "2025-03-01T12:00:00", "2.0000", "every 20"],
        ["30", "yes", "1.0", "2025-03-01T12:00:00", "last 1"],
        ["20.damaged", "no", "0.0", "set aside"],
        ["40.orbax-checkpoint-tmp", "no", "0.0", "half-written, or half-deleted"],
    ]


def test_undamaged_files(run, capsys):
    assert main(["verify", str(run)]) == 0
    assert capsys.readouterr().out == "step 10: undamaged\nstep 20: undamaged\nstep 30: undamaged\n"


def test_damaged_files_are_named(run, capsys):
    folder = run / CHECKPOINTS
    (folder / "10" / "array").write_bytes(bytes(2**20 - 1) + b"\1")
    (folder / "30" / "array").unlink()
    (folder / "20" / SUMS).unlink()
    assert main(["verify", str(run)]) == 2
    out, errors = capsys.readouterr()
    assert out == "step 10: damaged files: 1\nstep 20: damaged files: 1\nstep 30: damaged files: 1\n"
    assert errors.startswith("CheckpointError: damaged files in ")
    for words in ("rule checkpoint-sums", "10/array: sha256", "30/array: no such file", f"20/{SUMS}: no such file"):
        assert words in errors


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_folder_without_checkpoints(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert "rule checkpoint-there" in capsys.readouterr().err
