"""The registered schedules with the options that matter for bubble and memory, whole and split."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from itertools import product

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.costs import Costs, share_of
from jaxpipe.schedules.methods.registry import REGISTRY, build
from jaxpipe.schedules.ordering.problem import Problem
from jaxpipe.schedules.passes.split_backward import split_backward
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.times import Times

# Option -> what is tried of it, where a generator takes it; the default is among these or comes first.
_VALUES: dict[str, tuple[object, ...]] = {
    "num_chunks": (1, 2, 3, 4),
    "waves": (1, 2),
    "scaling": ("concatenate", "figure", "early_forwarding"),
    "forward_doubling": (False, True),
    "backward_first": (False, True),
}


def registered(problem: Problem, costs: Costs, slots: float) -> Iterator[Schedule]:
    """Registered schedules that solve `problem`, and their forms with split backwards.

    Args:
        problem: to solve.
        costs: of a device's share; generators that ask for times are given these.
        slots: the microbatches, in Ma, for which there is room, where a generator asks for a bound.
    """
    times = times_of(costs, problem.num_devices)
    for name in sorted(REGISTRY):
        for options in _options(name, problem, times, slots):
            try:
                schedule = build(
                    name,
                    num_devices=problem.num_devices,
                    num_microbatches=problem.num_microbatches,
                    **options,
                )
            except ScheduleError:  # it does not exist on so many devices
                continue
            if problem.allows(schedule.placement):
                yield schedule
                yield from split_forms(schedule, times, slots)


def times_of(costs: Costs, num_devices: int) -> dict[str, float]:
    """The times that generators ask for, of the mean device's share."""
    return {time: share_of(getattr(costs, time), num_devices) for time in Times._fields}


def split_forms(schedule: Schedule, times: dict[str, float], slots: float) -> Iterator[Schedule]:
    """`schedule` with split backwards, if it has whole ones: storing no more than before, and up to `slots` Ma."""
    room = int(slots * schedule.placement.num_chunks)
    options = ({},) if schedule.has_transfers else (times, {"bound": room, **times})
    for each in options:
        try:
            yield split_backward(schedule, **each)  # pyright: ignore[reportArgumentType]
        except ScheduleError:  # it is split already, or stores more
            pass


def _options(name: str, problem: Problem, times: dict[str, float], slots: float) -> Iterator[dict[str, object]]:
    known = inspect.signature(REGISTRY[name]).parameters
    values = {option: tried for option, tried in _VALUES.items() if option in known}
    if "injected" in known:
        most = (3 * problem.num_devices - 2) // 2
        values["injected"] = tuple({min(max(2, int(slots)), most): None, most: None})
    fixed = {time: value for time, value in times.items() if time in known}
    for chosen in product(*values.values()):
        yield {**dict(zip(values, chosen, strict=True)), **fixed}
