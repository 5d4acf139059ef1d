"""Executes the notebooks of this folder, each in a fresh kernel, and keeps what they show.

python -m experiments.notebooks.execute [NAME ...]    # all, or those whose file names begin with a NAME

What is kept is the same every time: no counts of executions, no times, nothing written to stderr; pictures are small.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
NOTEBOOKS = tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb")))
TIMEOUT_S = 240  # of one cell; on a busy machine, too
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def path_of(name: str) -> Path:
    """The file of a notebook."""
    return FOLDER / f"{name}.ipynb"


def execute(name: str) -> NotebookNode:
    """The notebook `name` with what its cells show, run in an empty folder by this Python.

    Raises:
        CellExecutionError: a cell fails, an assertion at the end for example.
    """
    notebook = nbformat.read(path_of(name), as_version=4)
    paths = [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # they compile more than they compute
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook, timeout=TIMEOUT_S, kernel_name=KERNEL["name"], resources={"metadata": {"path": folder}}
        )
        client.execute(env=environment)
    return cleaned(notebook)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """The same without what differs from one execution to the next."""
    notebook.metadata = NotebookNode(kernelspec=NotebookNode(KERNEL), language_info=NotebookNode(name="python"))
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", NotebookNode()
        if cell.cell_type == "code":
            cell.execution_count = None
            cell.outputs = _joined(output for output in cell.outputs if output.get("name") != "stderr")
            for output in cell.outputs:
                if "execution_count" in output:
                    output.execution_count = None
    return notebook


def _joined(outputs: Iterable[NotebookNode]) -> list[NotebookNode]:
    """Neighbours that are printed as one: a busy kernel sends what a cell prints in several pieces."""
    found: list[NotebookNode] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream":
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def texts(notebook: NotebookNode) -> list[str]:
    """What its cells print and draw as SVG, in their order; not PNG, which fonts draw differently."""
    return list(_texts(notebook))


def _texts(notebook: NotebookNode) -> Iterator[str]:
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                yield output.text
            elif "image/png" not in output.data:
                yield output.data.get("image/svg+xml", output.data["text/plain"])


def main() -> None:
    """Executes those that are asked for, and says how long each takes."""
    parser = argparse.ArgumentParser(description="Executes the notebooks and keeps what they show.")
    parser.add_argument("names", nargs="*", help="beginnings of file names; all by default")
    asked = tuple(parser.parse_args().names) or ("",)
    for name in filter(lambda name: name.startswith(asked), NOTEBOOKS):
        begun_s = time.perf_counter()
        nbformat.write(execute(name), path_of(name))
        print(f"{name}: {time.perf_counter() - begun_s:.0f} s, {path_of(name).stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
