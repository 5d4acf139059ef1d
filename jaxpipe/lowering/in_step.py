"""Rounds for any schedule at all, at the price of exposed messages: as time goes by, one exchange each forward.

Where actions take one or two forwards each, all of them begin and end at whole forwards on the asynchronous clock.
Give each of these times a round of messages, in which everybody may meet every neighbour, and put between two of them a
round for the actions of one forward. An action of two forwards is at work at one time of exchange, and stands in its
round. So at each exchange every device is either at that very time or in the action of that round, and none
waits for another: the rolled program is as fast as the asynchronous clock.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Schedule

IN_STEP_ROUNDS = 2  # of a body: one for messages and longer actions, one for those of one forward
LONGEST = 2  # forwards that an action may take


def in_step_rounds(schedule: Schedule, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[A], [A] the round of each action, and the one in which its message travels.

    Args:
        schedule: compute actions alone.
        lengths: [kinds] of actions, in forwards; longer ones than `LONGEST` are taken for that.
    """
    lengths = np.minimum(lengths, LONGEST)
    of_kind = lengths.astype(float)
    costs = Costs(*of_kind[:4].tolist())
    timeline = simulate(schedule, costs)
    start, end = timeline.start.astype(int), timeline.end.astype(int)
    return IN_STEP_ROUNDS * start + lengths[schedule.columns.kind], IN_STEP_ROUNDS * end
