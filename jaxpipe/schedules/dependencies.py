"""What each action waits for: the message it computes on, and what its own device kept for it.

Shared by the simulator and the lowering, so that both mean the same by "dependency". A schedule that
breaks the rules may leave dependencies out (-1); `check` in `rules` says so first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Dependencies:
    """Indices into the schedule's columns; -1 where there is none."""

    # For F the F of the stage before; for B, I the B or I of the stage after, at the last stage its F.
    message: np.ndarray  # [A]
    local: np.ndarray  # [A] the F of the same stage (for B, I), the I of the same stage (for W)


def dependencies(schedule: Schedule) -> Dependencies:
    """The dependencies of every compute action of `schedule`."""
    columns = schedule.columns
    num_stages, stage, microbatch = schedule.num_stages, columns.stage, columns.microbatch
    forward = np.full((num_stages, schedule.num_microbatches), -1)
    backward = forward.copy()
    is_f, is_w = columns.is_kind(Kind.F), columns.is_kind(Kind.W)
    is_b = columns.is_kind(Kind.B, Kind.I)
    forward[stage[is_f], microbatch[is_f]] = np.flatnonzero(is_f)
    backward[stage[is_b], microbatch[is_b]] = np.flatnonzero(is_b)

    message = np.full(len(stage), -1)
    local = message.copy()
    later = is_f & (stage > 0)
    message[later] = forward[stage[later] - 1, microbatch[later]]
    turn = is_b & (stage == num_stages - 1)
    message[turn] = forward[stage[turn], microbatch[turn]]
    earlier = is_b & ~turn
    message[earlier] = backward[stage[earlier] + 1, microbatch[earlier]]
    local[is_b] = forward[stage[is_b], microbatch[is_b]]
    local[is_w] = backward[stage[is_w], microbatch[is_w]]
    return Dependencies(message, local)
