"""Where does the time of each device go: into work, or into waiting at the beginning, between, at the end?

Goes in: a Timeline. Comes out: times that add up to its makespan on every device. What an action waited for is
`held_up`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies, previous_in_row
from jaxpipe.schedules.analysis.simulate import Timeline
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind


@dataclass(frozen=True)
class Idle:
    """Times of each device, in the unit of the costs; together they are the makespan.

    Attributes:
        work: compute kind -> [device] time in actions of this kind.
        before: [device] until its first action starts.
        between: [device] in which it waits from there to the end of its last action.
        after: [device] from there on.
    """

    work: dict[Kind, np.ndarray]
    before: np.ndarray
    between: np.ndarray
    after: np.ndarray


def idle(timeline: Timeline) -> Idle:
    """What each device does, and when it does nothing; a device without actions has all its time before.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> first, last = idle(simulate(build("1f1b", num_devices=2, num_microbatches=1))).between.tolist()
        >>> first, last  # the first device waits for 1F0 and 1B0
        (3.0, 0.0)
    """
    columns, num_devices = timeline.schedule.columns, timeline.schedule.num_devices
    duration = timeline.end - timeline.start
    work = {
        kind: np.bincount(columns.device, duration * columns.is_kind(kind), minlength=num_devices)
        for kind in sorted(COMPUTE_KINDS)
    }
    is_work = columns.is_kind(*COMPUTE_KINDS)
    before, last = np.full(num_devices, timeline.makespan), np.zeros(num_devices)
    np.minimum.at(before, columns.device[is_work], timeline.start[is_work])
    np.maximum.at(last, columns.device[is_work], timeline.end[is_work])
    last = np.maximum(last, before)
    between = last - before - np.sum(list(work.values()), axis=0)
    return Idle(work, before, np.maximum(between, 0.0), timeline.makespan - last)


# The critical path.

NOTHING = -1
ROUNDING = 1e-9  # of the makespan: what lasts less is rounding


def held_up(timeline: Timeline, costs: Costs | None = None) -> np.ndarray:
    """[A] the action that each one started after, as index of the schedule's columns; NOTHING where it started at 0.

    Of several that ended at the same moment it is the one before it on the same device, so that an action that did not
    wait is held up by its predecessor. A transfer is held up by the action that it was issued after, or by the
    transfer of its pair before it.

    Args:
        timeline: from `simulate(schedule, costs)`.
        costs: the same.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> schedule = build("1f1b", num_devices=2, num_microbatches=1)  # rows 0F0 0B0, 1F0 1B0
        >>> held_up(simulate(schedule)).tolist()
        [-1, 3, 0, 2]
    """
    schedule, columns = timeline.schedule, timeline.schedule.columns
    needs, end = dependencies(schedule), timeline.end
    link = (costs or Costs()).of_link(schedule.num_devices)
    before = previous_in_row(schedule, columns.is_kind(*COMPUTE_KINDS))
    message_end = end[needs.message] + link[columns.device[needs.message], columns.device]
    candidates = np.stack([before, needs.message, needs.load])
    arrival = np.where(candidates >= 0, np.stack([end[before], message_end, end[needs.load]]), -np.inf)

    is_move = ~columns.is_kind(*COMPUTE_KINDS)
    if is_move.any():
        candidates[1:, is_move] = _before_transfers(timeline, before, needs.met)[:, is_move]
        arrival[1:, is_move] = np.where(candidates[1:] >= 0, end[candidates[1:]], -np.inf)[:, is_move]
    rounding = ROUNDING * timeline.makespan
    arrival = np.where(arrival > timeline.start + rounding, -np.inf, arrival)  # what it did not wait for
    latest = (arrival >= arrival.max(axis=0) - rounding).argmax(axis=0)
    chosen = candidates[latest, np.arange(len(end))]
    return np.where(arrival.max(axis=0) > rounding, chosen, NOTHING)


def _before_transfers(timeline: Timeline, before: np.ndarray, met: np.ndarray) -> np.ndarray:
    """[2, A] for a transfer the one of its pair before it, and for a SYNC the action before its other half."""
    schedule, columns = timeline.schedule, timeline.schedule.columns
    found = np.full((2, len(met)), NOTHING)
    found[1] = np.where(met >= 0, before[met], NOTHING)
    is_transfer = columns.is_kind(Kind.EVICT, Kind.LOAD) | (met >= 0)
    moves = np.flatnonzero(is_transfer & ~((met >= 0) & (met < np.arange(len(met)))))  # a SYNC once, not twice
    pair = np.minimum(columns.device, schedule.placement.partner_of(columns.device))[moves]
    order = np.lexsort((timeline.end[moves], timeline.start[moves], pair))
    moves, pair = moves[order], pair[order]
    follows = np.flatnonzero(pair[1:] == pair[:-1]) + 1
    found[0, moves[follows]] = moves[follows - 1]
    twice = moves[met[moves] >= 0]
    found[0, met[twice]] = found[0, twice]
    return found
