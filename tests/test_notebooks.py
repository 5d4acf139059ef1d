"""The notebooks run from top to bottom, and show what is kept of them."""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from experiments.notebooks import execute
from experiments.notebooks.execute import NOTEBOOKS, cleaned, path_of, texts

SHORT = ("compare_schedules",)
MOST_BYTES = 400_000  # of a file: pictures are kept


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.ci if name in SHORT else pytest.mark.slow) for name in NOTEBOOKS]
)
def test_a_notebook_shows_what_is_kept(name):
    kept = nbformat.read(path_of(name), as_version=4)
    assert texts(execute.execute(name)) == texts(kept)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_is_kept_is_small_and_would_not_change(name):
    kept = nbformat.read(path_of(name), as_version=4)
    nbformat.validate(kept)
    assert path_of(name).stat().st_size < MOST_BYTES
    assert kept == cleaned(nbformat.read(path_of(name), as_version=4))
    *_, last = kept.cells
    assert "assert" in last.source, "a notebook ends by checking its numbers"
    assert texts(kept), "a notebook is kept with what it shows"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_defines_nothing_reusable(name):
    """A function of more lines would belong to the library."""
    for cell in nbformat.read(path_of(name), as_version=4).cells:
        lines = cell.source.splitlines()
        starts = [number for number, line in enumerate(lines) if line.startswith(("def ", "class "))]
        for start in starts:
            body = [line for line in lines[start + 1 :] if line]
            length = next((n for n, line in enumerate(body) if not line.startswith((" ", ")"))), len(body))
            assert length < 12, lines[start]


def test_what_a_cell_prints_in_pieces_is_kept_as_one():
    pieces = [nbformat.v4.new_output("stream", name=name, text=f"{n}\n") for n, name in enumerate(["stdout"] * 2)]
    pieces.insert(1, nbformat.v4.new_output("stream", name="stderr", text="a warning\n"))
    cell = nbformat.v4.new_code_cell("", outputs=[*pieces, nbformat.v4.new_output("display_data", {"text/plain": "x"})])
    assert texts(cleaned(nbformat.v4.new_notebook(cells=[cell]))) == ["0\n1\n", "x"]


@pytest.mark.ci
def test_a_failing_cell_is_an_error(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("assert 7 / 103 == 0")])
    nbformat.write(notebook, tmp_path / "bad.ipynb")
    monkeypatch.setattr(execute, "FOLDER", tmp_path)
    with pytest.raises(CellExecutionError, match="AssertionError"):
        execute.execute("bad")


def test_what_differs_from_run_to_run_is_not_kept():
    output = nbformat.v4.new_output("execute_result", {"text/plain": "3"}, execution_count=7)
    warning = nbformat.v4.new_output("stream", name="stderr", text="a warning")
    cell = nbformat.v4.new_code_cell("1 + 2", execution_count=7, outputs=[output, warning])
    cell.metadata["execution"] = {"iopub.status.busy": "2026-11-22"}
    clean = cleaned(nbformat.v4.new_notebook(cells=[cell]))
    assert texts(clean) == ["3"]
    assert clean.cells[0].execution_count is None
    assert clean.cells[0].outputs[0].execution_count is None
    assert clean.cells[0].metadata == {}
