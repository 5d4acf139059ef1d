"""What fits with and without BPipe, and how fast the fastest of what fits is.

Goes in: cells and a `System`, whose bytes and times are taken. Comes out: bytes and model FLOPs utilization of each
cell, and of some cells the best that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from grid import TOPOLOGY, Cell

from experiments.megatron_bytes import stage_bytes
from experiments.megatron_kernels import MegatronKernels
from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.estimate import Roofline, Setting, TimeSource, estimate, memory

LIMIT_BYTES = TOPOLOGY.hardware.memory_bytes - RESERVE_BYTES
ROOFLINE = Roofline(TOPOLOGY.hardware)


@dataclass(frozen=True)
class System:
    """Whose step is predicted.

    Attributes:
        name: as printed.
        num_bytes: what a setting takes of the fullest device.
        source: of times.
        recompute: the ways to recompute that it has, as `grid` names them.
    """

    name: str
    num_bytes: Callable[[Setting], float]
    source: TimeSource
    recompute: tuple[str, ...]


@cache
def _megatron_bytes(setting: Setting) -> float:
    return float(stage_bytes(setting).max())


@cache
def _whole_bytes(setting: Setting) -> float:
    return float(stage_bytes(setting, sequence_parallel=False).max())


@cache
def _our_bytes(setting: Setting) -> float:
    return float(memory(setting).total)


MEGATRON = System("Megatron-LM of 2023", _megatron_bytes, MegatronKernels(ROOFLINE), ("none", "attention", "full"))
WHOLE = replace(MEGATRON, name="the same, no sequence parallelism", num_bytes=_whole_bytes)
JAXPIPE = System("jaxpipe", _our_bytes, ROOFLINE, ("none", "attention", "full"))
SYSTEMS = (MEGATRON, WHOLE, JAXPIPE)


@dataclass(frozen=True)
class Best:
    """The fastest setting that fits.

    Attributes:
        setting: itself.
        recompute: as `grid` names it.
        mfu: as predicted.
    """

    setting: Setting
    recompute: str
    mfu: float

    @property
    def text(self) -> str:
        """As printed."""
        return f"{self.recompute}, b={self.setting.microbatch_size}: {self.mfu:.1%}"


def fits(num_bytes: float) -> bool:
    """Whether a device has room for a step of so many bytes."""
    return num_bytes <= LIMIT_BYTES


def mfu(setting: Setting, system: System) -> float:
    """As predicted."""
    return estimate(setting, system.source).mfu


def best(cells: Iterable[Cell], system: System, *, balanced: bool) -> Best | None:
    """The fastest that fits, under BPipe or under 1F1B; None where nothing does."""
    choices = []
    for cell in cells:
        setting = cell.balanced if balanced else cell.plain
        if cell.recompute in system.recompute and fits(system.num_bytes(setting)):
            choices.append(Best(setting, cell.recompute, mfu(setting, system)))
    return max(choices, key=lambda each: each.mfu, default=None)
