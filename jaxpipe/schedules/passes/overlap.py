"""Pairs: a forward and the backward behind it become one action, so that each hides the collectives of the other.

Goes in: any schedule. Comes out: the same rows, in which some F and the B or I behind them are pairs. Left to others:
how much time a pair saves (`Costs.pair`), and how it is computed (`jaxpipe.program`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies, execution_order
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.analysis.timeline import Timeline, rounded
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Kind, Schedule


def overlap(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns `schedule` with pairs, or `schedule` itself if pairs would make it longer, or none are possible.

    A pair waits for what both halves read, and what it leaves is there at its end. So most orders get longer by pairs,
    1F1B's by half and more: a forward of it hands its output to the next device, whose backward the one behind it waits
    for. Orders with a forward more ahead, as by `Method.room_for_pairs`, have room, and keep their length.

    1. Each F directly before a B or I is paired, unless one needs the other, by way of other devices too.
    2. If this makes the step longer at `costs`, only those are paired whose backward could have begun with its forward,
       and whose forward nobody reads before that backward has ended.
    3. If it is longer still, or fewer than one a device are left, none are.

    Args:
        schedule: a legal schedule.
        costs: costs of its stages; by default `Costs()`, by which a pair takes as long as its halves.

    Raises:
        ScheduleError: the schedule has EVICT and LOAD, or no flush.

    Example:
        >>> from jaxpipe.schedules import build
        >>> kimi = build("interleaved_1f1b", num_devices=4, num_microbatches=8, extra_warm_up=True)
        >>> num_pairs(overlap(kimi)), num_pairs(overlap(build("1f1b", num_devices=4, num_microbatches=8)))
        (32, 0)

    Source: Kimi K2, arXiv 2507.20534, section on parallelism; DeepSeek-V3, arXiv 2412.19437, section 3.2.1, for actions
    that are two. As a pass on any schedule it is ours.
    """
    costs = costs or Costs()
    for what, is_there in (("EVICT and LOAD", schedule.parks_pages), ("no flush", bool(schedule.delays))):
        if is_there:
            raise ScheduleError(
                f"{schedule.name!r} has {what}.",
                rule="pairs-stay: pairs are for schedules with a flush, whose activations stay on their device",
                repair="leave the pairs out, or take another schedule, as 'interleaved_1f1b' with extra_warm_up=true",
            )
    if schedule.has_pairs:
        return schedule
    before = simulate(schedule, costs)
    columns = schedule.columns
    is_first = np.append(columns.is_kind(*BACKWARD_KINDS)[1:], False) & columns.is_kind(Kind.F)
    # The last action of a row is behind no other.
    first = np.flatnonzero(is_first & (columns.position + 1 < np.diff(columns.first)[columns.device]))
    for tried in (first, first[_have_room(before, first)]):
        paired = _legal(schedule, tried)
        # Fewer than one a device are where warm-up or cool-down happen to meet, not a steady state.
        if num_pairs(paired) < schedule.num_devices:
            break
        if rounded(simulate(paired, costs).makespan) <= rounded(before.makespan):
            return paired
    return schedule


def num_pairs(schedule: Schedule) -> int:
    """The number of pairs."""
    return int((schedule.columns.partner >= 0).sum()) // 2


def check_apart(schedule: Schedule, change: str) -> None:
    """Raises ScheduleError if `schedule` has pairs, which `change` would part."""
    if schedule.has_pairs:
        raise ScheduleError(
            f"{schedule.name!r} has pairs.",
            rule=f"pairs-last: rows are paired when nothing more is put into them, here by {change}",
            repair="change the schedule that it was made from, and pair then",
        )


def apart(schedule: Schedule) -> Schedule:
    """Returns `schedule` with its pairs as two actions, the forward first; itself if it has none."""
    return joined(schedule, ()) if schedule.has_pairs else schedule


def joined(schedule: Schedule, first: Iterable[int]) -> Schedule:
    """Returns `schedule` in which the actions `first`, indices, and those behind them are pairs, and no others."""
    chosen = set(first)
    starts = schedule.columns.first.tolist()
    rows = tuple(
        tuple(action._replace(joined=start + place in chosen) for place, action in enumerate(row))
        for start, row in zip(starts, schedule.rows, strict=False)
    )
    return replace(schedule, rows=rows)


def _legal(schedule: Schedule, first: np.ndarray) -> Schedule:
    """`schedule` with those pairs for which no device waits for itself."""
    needs = dependencies(schedule)
    first = first[needs.message[first + 1] != first]
    while True:
        paired = joined(schedule, first.tolist())
        _, stuck = execution_order(paired, needs)
        if not stuck:
            return paired
        # Of every circle one device at least is stuck at a pair.
        first = np.setdiff1d(first, list(stuck.values()))


def _have_room(timeline: Timeline, first: np.ndarray) -> np.ndarray:
    """Whether the F and the action behind it may be one without a wait of anybody else."""
    message = dependencies(timeline.schedule).message
    could_begin = np.where(message >= 0, timeline.end[message], 0.0)
    earliest_read = np.full(len(message), np.inf)
    readers = np.flatnonzero(message >= 0)
    np.minimum.at(earliest_read, message[readers], timeline.start[readers])
    least = 1e-9 * timeline.makespan
    return (could_begin[first + 1] <= timeline.start[first] + least) & (
        earliest_read[first] >= timeline.end[first + 1] - least
    )
