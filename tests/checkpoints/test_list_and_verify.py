"""`python -m jaxpipe.checkpoints`: what a run has, and what is damaged; no arrays are read."""

import re

import pytest

from jaxpipe.checkpoints import files as sums
from jaxpipe.checkpoints.__main__ import main
from jaxpipe.checkpoints.files import (
    CHECKPOINTS,
    SUMS,
    About,
    complete_steps,
    delete,
    read_about,
    unfinished_path,
    write_sums,
)

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
    (folder / "20.damaged" / "array").write_bytes(bytes(2**19))
    assert main(["list", str(run)]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert [re.split(" {2,}", row) for row in rows] == [
        ["step", "complete", "MiB", "written (UTC)", "held-out loss", "kept because of"],
        ["10", "yes", "1.0", "2025-03-01T12:00:00", "1.5000", "best 1"],
        ["20", "yes", "1.0", "2025-03-01T12:00:00", "2.0000", "every 20"],
        ["30", "yes", "1.0", "2025-03-01T12:00:00", "last 1"],
        ["20.damaged", "no", "0.5", "set aside"],
        ["40.orbax-checkpoint-tmp", "no", "0.0", "half-written or half-deleted"],
    ]
    assert last.startswith("nothing deletes what is set aside")


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


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_listed(run, capsys, monkeypatch):
    def read_and_delete(path):
        about = read_about(path)
        if path.name == "10":
            delete(path.parent, 10)
        return about

    monkeypatch.setattr("jaxpipe.checkpoints.files.read_about", read_and_delete)
    assert main(["list", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "20", "30"]


def test_the_list_is_made_anew_where_all_is_deleted_meanwhile(run, capsys, monkeypatch):
    def read_and_replace(path):
        for step in complete_steps(path.parent):
            if step < 30:
                delete(path.parent, step)
        if path.name == "30":
            path.rename(path.with_name("40"))
        return about_of(path)

    about_of = read_about
    monkeypatch.setattr("jaxpipe.checkpoints.files.read_about", read_and_replace)
    assert main(["list", str(run)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step", "40"]


def test_a_checkpoint_that_vanishes_while_names_are_read_counts(run, monkeypatch):
    """The run has deleted it for a newer one, which is not among the names that were read."""
    folder = run / CHECKPOINTS
    found = list(folder.iterdir())
    for step in (10, 20, 30):
        delete(folder, step)
    (folder / "notes").write_text("")
    (folder / "50").write_text("")
    monkeypatch.setattr("pathlib.Path.glob", lambda path, pattern: [*found, folder / "notes", folder / "50"])
    assert complete_steps(folder) == [10, 20, 30]


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_damaged(run, capsys, monkeypatch):
    def read_and_delete(path):
        delete(path.parents[1], 10)
        return sum_of(path)

    sum_of = sums._sum
    monkeypatch.setattr(sums, "_sum", read_and_delete)
    assert main(["verify", str(run)]) == 0
    out, errors = capsys.readouterr()
    assert out == "step 10: deleted meanwhile by its run\nstep 20: undamaged\nstep 30: undamaged\n"
    assert not errors


def test_sums_where_the_system_does_not_tell_which_cores_a_process_may_use(run, monkeypatch):
    monkeypatch.delattr("os.sched_getaffinity")
    folder = run / CHECKPOINTS / "10"
    before = (folder / SUMS).read_text()
    write_sums(folder)
    assert (folder / SUMS).read_text() == before


@pytest.mark.parametrize("command", ["list", "verify"])
def test_a_folder_without_checkpoints(tmp_path, capsys, command):
    assert main([command, str(tmp_path)]) == 2
    assert "rule checkpoint-there" in capsys.readouterr().err
