"""A file is there complete or not at all."""

import pytest

from jaxpipe.files import whole_files, write_whole


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "config.json"
    write_whole(file, "old")

    def fail():
        with whole_files([file]) as (opened,):
            opened.write(b"half of the n")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert names(tmp_path) == ["config.json"]
    assert file.read_text() == "old"
    write_whole(file, "new")
    assert file.read_text() == "new"


def test_what_a_killed_process_left_is_overwritten(tmp_path):
    (tmp_path / "config.json.partial").write_text("much more than what comes now")
    write_whole(tmp_path / "config.json", "{}")
    assert names(tmp_path) == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "{}"


def test_the_last_of_several_files_is_there_only_if_all_are(tmp_path):
    first, last = tmp_path / "text.bin", tmp_path / "text.idx"
    for path in (first, last):
        path.write_text("old")
    first.unlink()
    first.mkdir()  # cannot be replaced

    def write():
        with whole_files([first, last]) as files:
            for file in files:
                file.write(b"new")

    with pytest.raises(OSError):  # noqa: PT011  # whichever the system says
        write()
    assert names(tmp_path) == ["text.bin"]


def test_a_folder_that_is_not_there_is_an_error_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "no" / "file", "")
