"""Rounds for schedules whose messages are read in the next action: neighbours exchange like the fields of a board.

In Chimera and BitPipe no message can travel behind an action, for its reader is what the neighbour does next. So
slots, with at most one action of each device, alternate with rounds of messages. In even slots the links (0, 1),
(2, 3), ... are in use, in odd ones (1, 2), (3, 4), ..., (D-1, 0): each device meets one neighbour, and one permute
carries all messages.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.lowering.rounds import LOCAL_ROUNDS, REMOTE_ROUNDS, earliest_congruent
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Schedule

CHECKERBOARD_ROUNDS = 2 * REMOTE_ROUNDS  # of a body: an even and an odd slot, each with its messages


def checkerboard_rounds(schedule: Schedule) -> np.ndarray:
    """[A] rounds, two for each slot: every action in the earliest slot that its message may leave in.

    The message of an action goes to a neighbour, over the link (d, d+1), after a slot that is even if d is. An action
    follows the one before it in its row, and the sender of its message, by a slot or more. From the closed forms of
    Chimera and BitPipe these are their slots.
    """
    columns, message = schedule.columns, dependencies(schedule).message
    reader = np.flatnonzero(message >= 0)
    ends = np.sort([columns.device[message[reader]], columns.device[reader]], axis=0)
    link = np.full(len(message), -1)  # that the action's own message takes: (d, d+1) is d, (D-1, 0) is D-1
    link[message[reader]] = np.where(ends[0] == ends[1], -1, np.where(ends[1] - ends[0] == 1, ends[0], ends[1]))

    residue = np.where(link >= 0, link % 2, -1)
    return REMOTE_ROUNDS * earliest_congruent(schedule, residue, 2, remote=LOCAL_ROUNDS)
