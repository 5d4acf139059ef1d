"""Schedules of the table of methods, with the options worth trying, whole and split: where the search starts."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.costs import Costs, mean_share
from jaxpipe.schedules.methods.registry import REGISTRY
from jaxpipe.schedules.ordering.problem import Problem
from jaxpipe.schedules.passes.split_backward import split_backward
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.times import Times

_MOST_CHUNKS = 4  # on a clock without messages more chunks are always slightly shorter, but take long to order


def registered(problem: Problem, costs: Costs, slots: float) -> Iterator[Schedule]:
    """Registered schedules that solve `problem`, and their forms with split backwards.

    Args:
        problem: the problem to solve.
        costs: costs of a device's share; generators that take times are given these.
        slots: number of microbatches that fit, in Ma, for generators that take a bound.
    """
    times = times_of(costs, problem.num_devices)
    for name in sorted(REGISTRY):
        method = REGISTRY[name]
        given = times if method.takes_times else {}
        for options in method.tried(problem.num_devices, slots):
            if options.get("num_chunks", 1) > _MOST_CHUNKS or not method.takes(problem.num_devices, **options):
                continue
            schedule = method.build(
                num_devices=problem.num_devices, num_microbatches=problem.num_microbatches, **options, **given
            )
            if problem.allows(schedule.placement):
                yield schedule
                yield from split_forms(schedule, times, slots)


def times_of(costs: Costs, num_devices: int) -> dict[str, float]:
    """The times for generators: those of the mean device's share."""
    return {time: mean_share(getattr(costs, time), num_devices) for time in Times._fields}


def split_forms(schedule: Schedule, times: dict[str, float], slots: float) -> Iterator[Schedule]:
    """`schedule` with split backwards, if it has whole ones: one storing no more than before, one up to `slots` Ma."""
    room = int(slots * schedule.placement.num_chunks)
    options = ({},) if schedule.has_transfers else (times, {"bound": room, **times})
    for each in options:
        try:
            yield split_backward(schedule, **each)  # pyright: ignore[reportArgumentType]
        except ScheduleError:  # it is split already, or stores more
            pass
