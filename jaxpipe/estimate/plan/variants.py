"""The schedules and options that a plan tries, and the numbers of devices that they can run on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from jaxpipe.config.pipeline import named_schedule
from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import REGISTRY
from jaxpipe.schedules.methods.option import Options, written_options
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.schedules.placement import Placement

ALONE = "1f1b"  # on one device all schedules are the same
MOST_DEVICES = 32  # most devices for an order that depends on times: its search takes seconds beyond


@dataclass(frozen=True)
class Variant:
    """A registered schedule with options.

    Attributes:
        name: name in the registry.
        options: options as `pipeline.options` writes them; without times.
    """

    name: str
    options: str


def takes_times(name: str) -> bool:
    """Whether the order of a schedule depends on the times of F, I and W; only then are backwards split."""
    return find_method(name).takes_times


def variants() -> tuple[Variant, ...]:
    """All variants for a pipeline of several devices: every method, with each set of options that it plans."""
    return tuple(
        Variant(name, _written(options, method.defaults))
        for name, method in sorted(REGISTRY.items())
        for options in method.planned()
    )


def _written(options: Options, defaults: Options) -> str:
    """The options as `pipeline.options` takes them: counts always, for readers; switches and words unless default."""
    shown = {k: value for k, value in options.items() if value != defaults[k] or not isinstance(value, (bool, str))}
    return written_options(shown)


@cache
def placement_of(variant: Variant, pipe: int) -> Placement | None:
    """The placement on `pipe` devices, for any microbatches; None if the schedule does not support as many devices."""
    if (pipe == 1 and variant.name != ALONE) or (pipe > MOST_DEVICES and takes_times(variant.name)):
        return None
    try:
        return named_schedule(variant.name, pipe, 1, variant.options).placement
    except ScheduleError:
        return None


def legal_placement(variant: Variant, pipe: int) -> Placement:
    """The placement on `pipe` devices of a schedule that is legal there."""
    placement = placement_of(variant, pipe)
    assert placement
    return placement
