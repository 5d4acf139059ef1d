"""Bubbles: the waiting time of each device, and the action that each action waited for.

Goes in: a Timeline. Comes out: the time that each device works and waits, which add up to the makespan; and for each
action its critical predecessor: followed back from the last action, these are the critical path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies, previous_in_row
from jaxpipe.schedules.analysis.timeline import Timeline
from jaxpipe.schedules.schedule import COMPUTE_KINDS, PARKING_KINDS, Kind

NOTHING = -1
ROUNDING = 1e-9  # fraction of the makespan below which a time is rounding


@dataclass(frozen=True)
class Bubbles:
    """Work and waiting of each device, in the unit of the costs; together they are the makespan."""

    work: dict[Kind, np.ndarray]  # compute kind -> [device] time in actions of this kind
    warm_up: np.ndarray  # [device] time until its first action starts
    internal: np.ndarray  # [device] waiting time between the start of its first action and the end of its last one
    cool_down: np.ndarray  # [device] time from the end of its last action to the makespan


def bubbles(timeline: Timeline) -> Bubbles:
    """The work and the bubbles of each device; a device without actions has one warm-up bubble.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> first, last = bubbles(simulate(build("1f1b", num_devices=2, num_microbatches=1))).internal.tolist()
        >>> first, last  # the first device waits for 1F0 and 1B0
        (3.0, 0.0)
    """
    columns = timeline.schedule.columns
    num_devices = timeline.schedule.num_devices
    duration = timeline.end - timeline.start
    work = {
        kind: np.bincount(columns.device, duration * columns.is_kind(kind), minlength=num_devices)
        for kind in sorted(COMPUTE_KINDS)
    }
    is_work = columns.is_kind(*COMPUTE_KINDS)
    warm_up = np.full(num_devices, timeline.makespan)
    last = np.zeros(num_devices)
    np.minimum.at(warm_up, columns.device[is_work], timeline.start[is_work])
    np.maximum.at(last, columns.device[is_work], timeline.end[is_work])
    # A device without actions: all of its time is warm-up, none cool-down.
    last = np.maximum(last, warm_up)
    internal = last - warm_up - np.sum(list(work.values()), axis=0)
    # Sums in another order may leave a tiny negative wait.
    return Bubbles(work, warm_up, np.maximum(internal, 0.0), timeline.makespan - last)


def critical_predecessors(timeline: Timeline, costs: Costs | None = None) -> np.ndarray:
    """The action whose end or message let each action start, [A]; NOTHING for an action that started at 0.

    If several ended at the same moment, it is the action before it on the same device: the predecessor of an action
    that did not wait. The predecessor of a transfer is the action that it was issued after, or the transfer of its pair
    before it.

    Args:
        timeline: a timeline from `simulate(schedule, costs)`.
        costs: the costs given to `simulate`.

    Returns:
        Indices into the schedule's columns.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> schedule = build("1f1b", num_devices=2, num_microbatches=1)  # 0: 0F0, 1: 0B0, 2: 1F0, 3: 1B0
        >>> critical_predecessors(simulate(schedule)).tolist()
        [-1, 3, 0, 2]
    """
    schedule = timeline.schedule
    columns = schedule.columns
    needs = dependencies(schedule)
    end = timeline.end
    link = (costs or Costs()).of_link(schedule.num_devices)
    before = previous_in_row(schedule, columns.is_kind(*COMPUTE_KINDS))
    message = needs.message.copy()
    travel = link[columns.device[needs.message], columns.device]
    for action, group in needs.groups.items():  # the last of those that meet before it
        message[action] = max(group, key=end.__getitem__)
        travel[action] = link.max()
    message_end = end[message] + travel
    candidates = np.stack([before, message, needs.load])
    # The index -1 reads the last action; minus infinity takes it out again.
    arrival = np.where(candidates >= 0, np.stack([end[before], message_end, end[needs.load]]), -np.inf)

    # Transfers do not wait for the same events as computations.
    is_transfer = ~columns.is_kind(*COMPUTE_KINDS)
    if is_transfer.any():
        candidates[1:, is_transfer] = _before_transfers(timeline, before, needs.met)[:, is_transfer]
        arrival[1:, is_transfer] = np.where(candidates[1:] >= 0, end[candidates[1:]], -np.inf)[:, is_transfer]

    rounding = ROUNDING * timeline.makespan
    arrival = np.where(arrival > timeline.start + rounding, -np.inf, arrival)  # arrivals that it did not wait for
    # `argmax` takes the first of equals: the action before in the row, so that the path stays on a device.
    latest = (arrival >= arrival.max(axis=0) - rounding).argmax(axis=0)
    chosen = candidates[latest, np.arange(len(end))]
    return np.where(arrival.max(axis=0) > rounding, chosen, NOTHING)


def _before_transfers(timeline: Timeline, before: np.ndarray, met: np.ndarray) -> np.ndarray:
    """[2, A] the previous transfer of the pair for each transfer, and the action before the other half of each SYNC."""
    schedule = timeline.schedule
    columns = schedule.columns
    before_transfer = np.full((2, len(met)), NOTHING)
    before_transfer[1] = np.where(met >= 0, before[met], NOTHING)
    is_transfer = columns.is_kind(*PARKING_KINDS) | (met >= 0)
    transfers = np.flatnonzero(is_transfer & ~((met >= 0) & (met < np.arange(len(met)))))  # a SYNC counts once
    pair = np.minimum(columns.device, schedule.keeper_of(columns.device))[transfers]
    # By pair, then in the order of travel; transfers without a time by their ends.
    order = np.lexsort((timeline.end[transfers], timeline.start[transfers], pair))
    transfers = transfers[order]
    pair = pair[order]
    follows = np.flatnonzero(pair[1:] == pair[:-1]) + 1
    before_transfer[0, transfers[follows]] = transfers[follows - 1]
    twice = transfers[met[transfers] >= 0]
    # Both halves of a SYNC have the same predecessor.
    before_transfer[0, met[twice]] = before_transfer[0, twice]
    return before_transfer
