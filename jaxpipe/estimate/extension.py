"""When does a schedule end that has many microbatches? Found from two of fewer.

Once a pipeline is full, a period of microbatches more takes as long every time: the end is on a straight line, exactly
where stages are equally long but for the head, to 0.4 % else. Orders that are searched with all their microbatches in
view have none exactly: those of the zero-bubble schedules are on a line to 2 %, early forwarding to 4 %; but no period
takes less than the device computes that has most to do. A method whose period is unknown, and a schedule of a file, are
looked at whole.
"""

from __future__ import annotations

from dataclasses import astuple
from functools import cache

import numpy as np

from jaxpipe.config.pipeline import named_schedule, options_of
from jaxpipe.estimate.clock import Makespans, Seconds, makespans
from jaxpipe.schedules.analysis.simulate import Clock
from jaxpipe.schedules.files import is_file_name
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.schedules.schedule import Kind

FEWEST_PERIODS = 3


def ends(name: str, num_devices: int, num_microbatches: int, options: str, seconds: Seconds) -> Makespans:
    """When the schedule of a name ends, as `named_schedule` takes it; up to five periods as `Clock` finds it."""
    few = few_microbatches(name, num_devices, num_microbatches, options)
    last = [makespans(clock_of(name, num_devices, num, options), seconds) for num in few]
    if len(few) == 1:
        return last[0]
    less, more = last
    num_periods = (num_microbatches - few[0]) / (few[1] - few[0])
    first, second = astuple(less), astuple(more)
    work_s = more.work_s - less.work_s
    return Makespans(*(a + num_periods * max(b - a, work_s) for a, b in zip(first, second, strict=True)))


def few_microbatches(name: str, num_devices: int, num_microbatches: int, options: str) -> tuple[int, ...]:
    """The numbers of microbatches to look at: two that are a period apart and as far into one, or the number itself.

    Example:
        >>> few_microbatches("1f1b", 4, 1026, "")
        (14, 18)
        >>> few_microbatches("1f1b", 4, 16, "")
        (16,)
    """
    period = _period(name, num_devices, options)
    if period is None or num_microbatches < (FEWEST_PERIODS + 2) * period:
        return (num_microbatches,)
    first = FEWEST_PERIODS * period + num_microbatches % period
    return first, first + period


@cache
def _period(name: str, num_devices: int, options: str) -> int | None:
    return None if is_file_name(name) else find_method(name).period_of(num_devices, options_of(options))


@cache
def clock_of(name: str, num_devices: int, num_microbatches: int, options: str) -> Clock:
    """The clock of a schedule, made once for all who ask."""
    return Clock(named_schedule(name, num_devices, num_microbatches, options))


def moved_slots(name: str, num_devices: int, num_microbatches: int, options: str) -> np.ndarray:
    """[source device, target device] slots that EVICT and LOAD move in a step, parts counted as parts."""
    few = few_microbatches(name, num_devices, num_microbatches, options)
    moved = [_moved_slots(name, num_devices, num, options) for num in few]
    if len(few) == 1:
        return moved[0]
    return moved[0] + (num_microbatches - few[0]) / (few[1] - few[0]) * (moved[1] - moved[0])


@cache
def _moved_slots(name: str, num_devices: int, num_microbatches: int, options: str) -> np.ndarray:
    schedule = named_schedule(name, num_devices, num_microbatches, options)
    columns, partner = schedule.columns, schedule.placement.partner_of
    slots = np.zeros((num_devices, num_devices))
    if not schedule.has_transfers:
        return slots
    share = np.array([float(schedule.parked_of(stage)) for stage in range(schedule.num_stages)])
    for kind, forth in ((Kind.EVICT, True), (Kind.LOAD, False)):
        moves = columns.is_kind(kind)
        home = columns.device[moves]
        away = partner(home)
        np.add.at(slots, (home, away) if forth else (away, home), share[columns.stage[moves]])
    return slots
