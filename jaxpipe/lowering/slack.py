"""How late may each action begin without making the step longer?"""

from __future__ import annotations

import numpy as np

from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import Timeline


def latest_starts(timeline: Timeline) -> np.ndarray:
    """[A] the latest start of each action with which all others still end by the makespan, messages taking no time.

    Args:
        timeline: of compute actions alone.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> timeline = simulate(build("gpipe", num_devices=2, num_microbatches=1))
        >>> timeline.start.tolist(), latest_starts(timeline).tolist()
        ([0.0, 4.0, 1.0, 2.0], [0.0, 4.0, 1.0, 2.0])
    """
    columns = timeline.schedule.columns
    message, position = dependencies(timeline.schedule).message.tolist(), columns.position.tolist()
    duration = (timeline.end - timeline.start).tolist()
    end = [timeline.makespan] * len(duration)
    latest = list(end)
    # What follows an action starts no earlier than it ends, and stands behind it in its row.
    for action in np.lexsort((np.arange(len(end)), timeline.end))[::-1].tolist():
        latest[action] = end[action] - duration[action]
        if position[action]:
            end[action - 1] = min(end[action - 1], latest[action])
        if (sender := message[action]) >= 0:
            end[sender] = min(end[sender], latest[action])
    return np.array(latest)
