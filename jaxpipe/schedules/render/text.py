"""A timeline as a grid of text: one line per device, every cell one unit of time."""

from __future__ import annotations

import numpy as np

from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.simulate import Costs, Timeline, simulate

IDLE = "..."
_MAX_CELLS_PER_ACTION = 8
_ONE_CELL = Costs(forward=1.0, backward=1.0, input_gradient=1.0, weight_gradient=1.0)


def text(schedule: Schedule, timeline: Timeline) -> str:
    r"""The grid of `schedule`: an action fills as many cells as it takes units of time, `...` is idle.

    The unit is the shortest action. Where times are no whole multiples of it, or the longest action is
    more than eight, every action fills one cell, and the last line says so. Actions that take no time
    (EVICT, LOAD, SYNC) are not in the grid.

    Args:
        schedule: what runs.
        timeline: when, from `simulate(schedule, costs)`.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> schedule = build("1f1b", num_devices=2, num_microbatches=2)
        >>> print(text(schedule, simulate(schedule)), end="")
        0  0F0 0F1 ... ... 0B0 0B0 ... 0B1 0B1
        1  ... 1F0 1B0 1B0 1F1 1B1 1B1 ... ...
    """
    unit = _unit(timeline)
    note = ""
    if unit is None:
        timeline, unit = simulate(schedule, _ONE_CELL), 1.0
        note = "(not to scale: one cell an action, transfers take no time)\n"
    start = np.rint(timeline.start / unit).astype(int)
    end = np.rint(timeline.end / unit).astype(int)
    num_cells = int(end.max(initial=0))
    labels = list(map(str, (action for row in schedule.rows for action in row)))
    cell = max(map(len, [*labels, IDLE]))
    head = len(str(schedule.num_devices - 1))
    idle = IDLE.ljust(cell)
    first = schedule.columns.first.tolist()
    lines = []
    for device in range(schedule.num_devices):
        cells = [idle] * num_cells
        for i in range(first[device], first[device + 1]):
            cells[start[i] : end[i]] = [labels[i].ljust(cell)] * (end[i] - start[i])
        lines.append(f"{device:>{head}}  {' '.join(cells)}".rstrip() + "\n")
    return "".join(lines) + note


def _unit(timeline: Timeline) -> float | None:
    """The time of one cell, or None where no unit makes a readable grid."""
    durations = timeline.end - timeline.start
    durations = durations[durations > 0]
    if not len(durations):
        return 1.0
    unit = float(durations.min())
    cells = np.concatenate([timeline.start, timeline.end]) / unit
    is_whole = np.abs(cells - np.rint(cells)).max() < 1e-6
    return unit if is_whole and durations.max() / unit <= _MAX_CELLS_PER_ACTION else None
