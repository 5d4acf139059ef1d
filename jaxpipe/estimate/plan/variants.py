"""Which schedules are tried, with which options, and which of them a pipeline of so many devices can run."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache

from jaxpipe.config.pipeline import named_schedule
from jaxpipe.errors import ScheduleError
from jaxpipe.estimate import Times
from jaxpipe.schedules import REGISTRY
from jaxpipe.schedules.placement import Placement

# Of a schedule that is not here, its defaults. Beyond these numbers of chunks a bubble that is small already gets
# smaller, and messages and stages get more.
OPTIONS: dict[str, tuple[str, ...]] = {
    "bitpipe": tuple(f"num_chunks={chunks}" for chunks in (1, 2, 3, 4)),
    "breadth_first": ("num_chunks=2", "num_chunks=4"),
    "chimera": ("", "forward_doubling=true"),
    "dualpipe": ("", "backward_first=true"),
    "dualpipe_v": ("", "backward_first=true"),
    "hanayo": ("waves=1", "waves=2"),
    "interleaved_1f1b": tuple(f"num_chunks={chunks}" for chunks in (2, 3, 4, 5, 6, 8)),
}
ALONE = "1f1b"  # of one device all schedules are one
MOST_DEVICES = 32  # of an order that is made for times: it is searched for, in seconds beyond
_STEPS = 5  # of a time that an order is made for: finer ones make other orders, hardly shorter ones, and take a search
_TIMES = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class Variant:
    """A registered schedule with options.

    Attributes:
        name: as in the registry.
        options: as `pipeline.options` writes them; of times none yet.
    """

    name: str
    options: str

    def options_for(self, times: Times) -> str:
        """The options with times, in forwards to a fifth; a schedule that is made without any has the same ones."""
        if not takes_times(self.name):
            return self.options
        ratios = {
            "input_gradient": _ratio(times.layer_input_gradient_s, times),
            "weight_gradient": _ratio(times.layer_weight_gradient_s, times),
        }
        return ",".join(filter(None, (self.options, *(f"{name}={ratio}" for name, ratio in ratios.items()))))


@cache
def takes_times(name: str) -> bool:
    """Whether the order of a schedule is made for the times of F, I and W; only then are backwards in two parts."""
    return set(_TIMES) <= set(inspect.signature(REGISTRY[name]).parameters)


def variants() -> tuple[Variant, ...]:
    """All that are tried on a pipeline of several devices."""
    return tuple(Variant(name, options) for name in REGISTRY for options in OPTIONS.get(name, ("",)))


@cache
def placement_of(variant: Variant, pipe: int) -> Placement | None:
    """Which of `pipe` devices holds which stage, whatever the microbatches; None where it is not for so many."""
    if (pipe == 1 and variant.name != ALONE) or (pipe > MOST_DEVICES and takes_times(variant.name)):
        return None
    try:
        return named_schedule(variant.name, pipe, 1, variant.options).placement
    except ScheduleError:
        return None


def legal_placement(variant: Variant, pipe: int) -> Placement:
    """The placement of a schedule that is for so many devices."""
    placement = placement_of(variant, pipe)
    assert placement
    return placement


def _ratio(seconds: float, times: Times) -> float:
    return max(1, round(_STEPS * seconds / times.layer_forward_s)) / _STEPS
