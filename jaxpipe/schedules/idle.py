"""Where does the time of each device go: into work, or into waiting at the beginning, between, at the end?

Goes in: a Timeline. Comes out: times that add up to its makespan on every device. What an action waited for is
`held_up`'s to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.action import COMPUTE_KINDS, Kind
from jaxpipe.schedules.simulate import Timeline


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
