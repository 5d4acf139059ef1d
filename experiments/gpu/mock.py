"""One device of 8 and of 64 GPUs that are not there: its part of whole steps, by `jaxpipe.measure --mock`.

What it shows: seconds of compute, host and guards of a device beside its busy time by the schedule's clock, and the
allocator's peak beside the accounted bytes. What it does not: sends, and waiting for them.

Each cell is a process of its own, since JAX takes a cluster once. Its step is measured with local collectives, so that
numbers stay finite. Most of a cell is compiling.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from experiments.gpu.cells import Cell, Part, Record, Size
from experiments.gpu.runs import ROOT

TIMEOUT_S = 240.0
NUM_REPEATS = 5
_SMALL = {"num_layers": 8, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "feed_forward": 128, "vocab_size": 256}


@dataclass(frozen=True)
class Case:
    """A device of a mesh.

    Attributes:
        name: of the model, as the page shows it.
        preset: config in `configs/`.
        method: name of the schedule.
        nodes: nodes of eight GPUs: pipe 8, with so many devices of tensor.
        stage: index along `pipe`.
    """

    name: str
    preset: str
    method: str
    nodes: int
    stage: int


_8B, _70B = ("LLaMA-3 8B", "llama3_8b"), ("LLaMA-3 70B", "llama3_70b")
# The middle ones first: their work is that of most devices.
CASES = (
    Case(*_8B, "1f1b", 1, 4),
    Case(*_8B, "zb_v", 1, 4),
    Case(*_70B, "1f1b", 8, 4),
    Case(*_8B, "bpipe", 1, 4),
    Case(*_8B, "1f1b", 1, 0),
    Case(*_8B, "1f1b", 1, 7),
    Case(*_8B, "zb_v", 1, 0),
    Case(*_8B, "zb_v", 1, 7),
    Case(*_8B, "bpipe", 1, 0),
    Case(*_8B, "bpipe", 1, 7),
    Case(*_70B, "zb_v", 8, 4),
)


def cases(size: Size) -> Sequence[Case]:
    """The cases of a size: all, or the first three if it is quick."""
    return CASES[:3] if size.quick else CASES


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each case."""
    for case in cases(size):
        name = f"{case.name}, {8 * case.nodes} GPUs, {case.method}, device {case.stage}"
        yield Cell(name, partial(_mock, size, case))


PART = Part("mock", "One device of many", cells, minutes=20, cell_s=TIMEOUT_S)


def fields_of(size: Size, case: Case) -> dict[str, object]:
    """Fields of the preset that are set otherwise; all devices of a stage are a node's."""
    pipe, tensor = (2, 2 if case.nodes > 1 else 1) if size.quick else (8, case.nodes)
    num_microbatches = 4 if size.quick else 16
    fields: dict[str, object] = {"mesh.data": 1, "mesh.pipe": pipe, "mesh.tensor": tensor}
    fields |= {"mesh.platform": size.device.platform, "pipeline.schedule": case.method, "pipeline.options": ""}
    fields |= {"pipeline.num_microbatches": num_microbatches, "data.batch_size": num_microbatches}
    fields["model.attention"] = "cudnn" if size.is_gpu else "chunked"
    if size.quick:
        fields |= {f"model.{name}": value for name, value in _SMALL.items()} | {"data.seq_len": 64}
    return fields


def command_of(size: Size, case: Case, output: Path) -> list[str]:
    """The command of a case, as a user gives it."""
    fields = fields_of(size, case)
    nodes, gpus = (1, 2 if case.nodes == 1 else 4) if size.quick else (case.nodes, 8)
    stage = min(case.stage, 1) if size.quick else case.stage
    command = [sys.executable, "-m", "jaxpipe.measure", f"--config={ROOT / 'configs' / case.preset}.py"]
    command += [f"--mock={nodes}x{gpus}", f"--stage={stage}", f"--output={output}"]
    command += [f"--num_repeats={2 if size.quick else NUM_REPEATS}"]
    return command + [f"--config.{name}={value}" for name, value in fields.items()]


def _mock(size: Size, case: Case) -> Record:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "costs.json"
        command = command_of(size, case, output)
        done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.strip().splitlines()[-3:]))
        costs = json.loads(output.read_text())
    found = costs["mock"]
    record: Record = {"costs": costs, "collectives": found["collectives"], "ms": 1e3 * found["step_s"]}
    if found["busy_s"] is not None:
        record["estimated_ms"] = 1e3 * found["busy_s"]
    record |= {"spread": found["spread_ratio"], "busy_forwards": found["busy_forwards"]}
    record |= {f"{name}_gib": found[f"{name}_bytes"] / 2**30 for name in ("accounted", "compiled")}
    if found["peak_bytes"] is not None:
        record["peak_gib"] = found["peak_bytes"] / 2**30
    return record | ({"updates_left_out": found["num_skipped"]} if found["num_skipped"] else {})
