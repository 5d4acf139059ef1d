"""A run's folder is made only where it can be, and only when it is asked for."""

import os
from pathlib import Path

import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.training import workdir


def test_checking_makes_nothing(tmp_path):
    path = workdir.check_new(f"{tmp_path}/a/b")
    assert path == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []
    assert workdir.create(f"{tmp_path}/a/b").is_dir()


def test_a_file_on_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"/file is a file\n *rule workdir-folder"):
        workdir.check_new(f"{tmp_path}/file/run")


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"cannot be written\n *rule workdir-writable"):
        workdir.check_new(f"{tmp_path}/run")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    def refuse(path: Path, **_) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"rule workdir-writable[^\n]*\n *[^\n]*run: Read-only file system"):
        workdir.create(f"{tmp_path}/run")
