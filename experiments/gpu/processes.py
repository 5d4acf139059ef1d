"""Whether several processes compute over NCCL what one process computes; they share the GPU (`--processes_per_device`).

What it shows: how several processes start on GPUs, NCCL's own calls, the order of collectives across processes, the
numbers. What it does not: speed, since the GPU gives its processes time slices in turn.

While XLA compiles it times kernels against each other, so that two compilations may choose different ones. That is off
here, so that digits say something of processes alone.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from experiments.gpu.cells import Cell, Part, Record, Size
from experiments.gpu.runs import ROOT, TIMEOUT_S, metrics_of_run
from experiments.gpu.training import MIXTURE, SMALL
from jaxpipe.schedules import DELAYED, REGISTRY, find_method

QUICKSTART = ROOT / "configs" / "quickstart.py"
NUM_MICROBATCHES = 4
TOLERANCE = 1e-5  # of a loss in float32, by SGD; AdamW would make rounding of small gradients into whole steps
SAME_KERNELS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
_MIXTURE = {f"model.{name}": value for name, value in SMALL[MIXTURE].items()}
_MIXTURE |= {"model.head_size": "auto", "model.vocab_size": 256, "model.dtype": "float32", "model.attention": "xla"}
_MIXTURE |= {"model.num_layers": 4, "data.seq_len": 64, "data.batch_size": 32}


@dataclass(frozen=True)
class Case:
    """A run of several processes, each with a device of the mesh.

    Attributes:
        method: name of the schedule.
        axes: axes of the mesh and their devices.
        shard: what devices with equal copies share, if it is not the config's default.
    """

    method: str
    axes: Mapping[str, int]
    shard: str = ""

    @property
    def num_processes(self) -> int:
        """One for each device of the mesh."""
        return math.prod(self.axes.values())

    @property
    def name(self) -> str:
        """Name of its cell."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        return f"{self.num_processes} processes, {self.method}, {mesh}{f', {self.shard} shared' * bool(self.shard)}"

    @property
    def is_mixture(self) -> bool:
        """Whether the model has experts."""
        return "expert" in self.axes

    @property
    def fields(self) -> dict[str, object]:
        """Fields of the config: mesh and schedule."""
        method = find_method(self.method)
        num_microbatches = method.nearest_microbatches(self.axes.get("pipe", 1), NUM_MICROBATCHES)
        mesh = {f"mesh.{axis}": size for axis, size in ({"pipe": 1} | dict(self.axes)).items()}
        shared: dict[str, object] = {"mesh.shard": self.shard} if self.shard else {}
        return shared | mesh | {"pipeline.schedule": self.method, "pipeline.num_microbatches": num_microbatches}


FIRST = (
    Case("1f1b", {"pipe": 2}),
    Case("zb_v", {"pipe": 4}),
    Case("bpipe", {"pipe": 4}),
    Case("bitpipe", {"pipe": 4}),
    Case("1f1b", {"data": 2}),
    Case("1f1b", {"data": 2}, shard="weights"),
    Case("1f1b", {"data": 2, "pipe": 2}, shard="gradients"),
    Case("zb_v", {"data": 2, "pipe": 2}, shard="weights"),
    Case("1f1b", {"tensor": 2}),
    Case("1f1b", {"expert": 2}),
    Case("1f1b", {"data": 2, "pipe": 2}),
    Case("1f1b", {"pipe": 2, "tensor": 2}),
    Case("1f1b", {"pipe": 2, "expert": 2}),
)
REPEATED = (Case("1f1b", {"pipe": 2}), Case("bitpipe", {"pipe": 4}))
OTHERS = [
    case
    for num_processes in (4, 2)
    for method in (*REGISTRY.values(), *DELAYED.values())
    if method.takes(num_processes) and (case := Case(method.name, {"pipe": num_processes})) not in FIRST
]


def cells(size: Size) -> Iterator[Cell]:
    """The cases that show most, then runs that are repeated; of a quick part those of two processes, and ZB-V."""
    for case in _of_size(size, FIRST):
        yield Cell(case.name, partial(_against_one, size, case))
    for case in _of_size(size, REPEATED):
        yield Cell(f"{case.name}, repeated", partial(_repeated, size, case))


def other_cells(size: Size) -> Iterator[Cell]:
    """The remaining methods; of a quick part one."""
    for case in OTHERS[:1] if size.quick else OTHERS:
        yield Cell(case.name, partial(_against_one, size, case))


PART = Part("processes", "Several processes on one GPU", cells, minutes=20, cell_s=2 * TIMEOUT_S)
METHODS = Part("methods", "Several processes, other methods", other_cells, minutes=40, cell_s=2 * TIMEOUT_S)


def _of_size(size: Size, cases: Iterable[Case]) -> list[Case]:
    return [case for case in cases if not size.quick or case.num_processes == 2 or case.method == "zb_v"]


def _against_one(size: Size, case: Case) -> Record:
    """The losses of the processes, beside those of one process."""
    rows = _run(size, case.fields, case.num_processes, is_mixture=case.is_mixture)
    if case.method in DELAYED:  # one device has no delay: its virtual CPU devices have
        alone = _run(size, case.fields | {"mesh.platform": "cpu"}, 1, is_mixture=case.is_mixture)
    else:
        alone = _one(size, is_mixture=case.is_mixture)
    apart = [abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(rows, alone, strict=True)]
    agree = all(each <= TOLERANCE for each in apart)  # false for NaN, which `max` may pass over
    return _said(rows) | {"most_apart": max(apart), f"within {TOLERANCE:g}": str(agree)}


def _repeated(size: Size, case: Case) -> Record:
    """Two runs whose sums have an order, and whether all their numbers have the same digits."""
    first, second = (
        _run(size, case.fields | {"mesh.deterministic": True}, case.num_processes, is_mixture=case.is_mixture)
        for _ in range(2)
    )
    names = ("loss", "grad_norm")
    same = [all(a[name] == b[name] for name in names) for a, b in zip(first, second, strict=True)]
    return _said(second) | {"same digits": str(all(same)), "steps of the same digits": sum(same)}


def _said(rows: list[dict[str, Any]]) -> Record:
    steps_s = [row["step_time_s"] for row in rows]
    return {"steps": len(rows), "last_loss": rows[-1]["loss"], "step_ms": 1e3 * statistics.median(steps_s)}


@cache
def _one(size: Size, *, is_mixture: bool) -> list[dict[str, Any]]:
    return _run(size, Case("1f1b", {}).fields, 1, is_mixture=is_mixture)


def _run(size: Size, fields: Mapping[str, object], num_processes: int, *, is_mixture: bool) -> list[dict[str, Any]]:
    """The rows of metrics of a run by SGD, with products in float32 proper."""
    common: dict[str, object] = {
        "mesh.platform": size.device.platform,
        "mesh.deterministic": False,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": 5e-3,
        "train.steps": 3 if size.quick else 20,
        "train.eval_batches": 1,
        "train.lost_after_s": 60.0,  # jaxpipe itself says where a step stands still
    }
    return metrics_of_run(
        MIXTURE if is_mixture else QUICKSTART,
        common | (_MIXTURE if is_mixture else {}) | dict(fields),
        num_processes=num_processes,
        JAX_DEFAULT_MATMUL_PRECISION="highest",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {SAME_KERNELS}",
    )
