"""What the scripts of experiments write alike."""

import doctest
import os
import subprocess
import sys

import pytest
from experiment_modules import EXPERIMENTS, modules_of
from matplotlib.figure import Figure

from experiments import pages
from experiments.pages import BEGIN, END, page_parser, put_between, put_sections, write_files
from experiments.png import content_of, png_of


def test_the_examples():
    assert doctest.testmod(pages) == (0, 2)


def test_writing_leaves_the_rest_of_the_page_alone():
    page = f"before\n{BEGIN}old\n{END}after\n"
    once = put_between("new\n", page)
    assert once == f"before\n{BEGIN}\nnew\n\n{END}after\n"
    assert put_between("new\n", once) == once


@pytest.mark.parametrize("page", ["", BEGIN, END, END + BEGIN, BEGIN + END + BEGIN + END, BEGIN + END + END])
def test_a_page_without_the_place_is_an_error(page):
    with pytest.raises(ValueError, match=r"has not '<!-- begin of what run\.py --write writes -->' and, after it"):
        put_between("new\n", page)


def test_every_section_goes_to_its_place():
    page = "<!-- a -->\n<!-- end of a -->\nbetween\n<!-- b c -->\nold\n<!-- end of b c -->\n"
    assert put_sections({"b c": "2\n", "a": "1\n"}, page) == (
        "<!-- a -->\n\n1\n\n<!-- end of a -->\nbetween\n<!-- b c -->\n\n2\n\n<!-- end of b c -->\n"
    )


def test_files_are_written_and_named(tmp_path, capsys):
    write_files({tmp_path / "README.md": "é\n", tmp_path / "picture.png": b"\x89"})
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "é\n"
    assert (tmp_path / "picture.png").read_bytes() == b"\x89"
    assert capsys.readouterr() == ("", "wrote README.md and picture.png\n")


def test_a_picture_says_what_it_was_told(tmp_path):
    (tmp_path / "picture.png").write_bytes(png_of(Figure(figsize=(1, 1)), content='{"peak": 4.5}'))
    assert content_of(tmp_path / "picture.png") == '{"peak": 4.5}'


def test_flags_are_off_unless_asked_for():
    parser = page_parser("What.", quick="less")
    assert vars(parser.parse_args([])) == {"quick": False, "write": False}
    assert vars(parser.parse_args(["--write"])) == {"quick": False, "write": True}
    with pytest.raises(SystemExit):
        parser.parse_args(["--qui"])


@pytest.mark.ci
def test_a_script_finds_what_pages_share(tmp_path):
    """Started from anywhere, without PYTHONPATH."""
    script = EXPERIMENTS / "020_reevaluation" / "run.py"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_modules_of_a_folder_are_there_for_as_long_as_asked():
    paths = list(sys.path)
    with modules_of("020_reevaluation"):
        outer = sys.modules["picture"]
        with modules_of("021_bpipe_elsewhere") as inner:
            assert sys.modules["picture"] is inner["picture"] is not outer
        assert sys.modules["picture"] is outer
        assert "shapes" not in sys.modules
    assert not {"picture", "ways"} & set(sys.modules)
    assert sys.path == paths
