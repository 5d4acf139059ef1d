"""The reference is built from docstrings by the guide's command, and without a warning."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = "python -m pdoc --docformat=google -o build/reference jaxpipe"


def build(module: str, folder: Path) -> str:
    """What is said while the reference of `module` is written to `folder`; warnings are errors."""
    _, *arguments = shlex.split(COMMAND.replace("build/reference jaxpipe", f"{folder} {module}"))
    command = [sys.executable, "-W", "error::UserWarning", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_the_guide_has_the_command():
    assert f"`{COMMAND}`" in (ROOT / "docs/guide.md").read_text()


@pytest.mark.ci
def test_the_reference_of_schedules_is_built(tmp_path):
    assert build("jaxpipe.schedules", tmp_path) == ""
    page = (tmp_path / "jaxpipe" / "schedules.html").read_text()
    assert "split_backward" in page
    assert "The makespan is no longer than before" in page  # of its docstring


@pytest.mark.slow
def test_the_whole_reference_is_built(tmp_path):
    assert build("jaxpipe", tmp_path) == ""
    built = {path.relative_to(tmp_path).with_suffix("") for path in tmp_path.rglob("*.html")}
    assert {Path("jaxpipe", name) for name in ("schedules", "program", "estimate", "mesh", "models")} <= built


def test_a_warning_would_be_an_error(tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_text("def f(x: 'NoSuchType'):\n    'Doc.'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(AssertionError, match="NoSuchType"):
        build("bad", tmp_path / "html")
