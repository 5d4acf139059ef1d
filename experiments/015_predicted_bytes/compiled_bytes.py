"""Compiles the grid, one cell after the other; what is there already stays.

python experiments/015_predicted_bytes/compiled_bytes.py    # about half a minute a cell; needs the extra gpu-aot

Goes in: the cells. Comes out: `results.jsonl`, a line for each: the bytes of `python -m jaxpipe.compile`, and what the
program's own account says is held between actions; or why the cell was left out. It can be ended at any time and goes
on where it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from byte_cells import Cell, cells

from jaxpipe.compile import absent_gpus, compile_step, predict

RESULTS = Path(__file__).parent / "results.jsonl"


def results() -> dict[str, dict[str, Any]]:
    """The lines of `RESULTS` by the names of their cells."""
    if not RESULTS.exists():
        return {}
    lines = map(json.loads, RESULTS.read_text().splitlines())
    return {line["cell"]: line for line in lines}


def compiled(cell: Cell) -> dict[str, Any]:
    """The line of a cell."""
    if (refusal := cell.refusal()) is not None:
        return {"cell": cell.name, "skipped": refusal}
    topology = cell.topology()
    step = compile_step(cell.config(), absent_gpus(topology), gpus_per_node=topology.gpus_per_node)
    memory = step.compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    known = predict(step.compiled, step.state, step.batch, has_dropout=step.has_dropout)
    return {
        "cell": cell.name,
        "total_bytes": arguments + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
        "argument_bytes": arguments,
        "temp_bytes": memory.temp_size_in_bytes,
        "compile_s": step.compile_s,
        "held": {"state": known.state, "batch": known.batch, **known.held},
    }


def main() -> None:
    """Appends a line for each cell that has none."""
    there = results()
    for cell in cells():
        if cell.name in there:
            continue
        line = compiled(cell)
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(cell.name, line.get("total_bytes") or line["skipped"], flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main()
