"""A timeline as a grid of text: one line per device, every cell one unit of time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxpipe.drawing.pictures import ARROWS
from jaxpipe.schedules import Costs, Timeline, simulate
from jaxpipe.schedules.analysis.costs import HEAD_TIMES, STAGE_TIMES
from jaxpipe.schedules.schedule import COMPUTE_KINDS, PARKING_KINDS

IDLE = "..."
_MAX_CELLS_PER_ACTION = 8
_MOST_CELLS = 2_000_000  # about 10 MB
_ONE_CELL = replace(Costs(), **dict.fromkeys((*STAGE_TIMES.values(), *HEAD_TIMES.values()), 1.0))


def text(timeline: Timeline) -> str:
    r"""The grid of a schedule: an action fills one cell per unit of its time, `...` is idle.

    The unit is the shortest action. If times are not whole multiples of it, or the longest action is more than
    eight units, every action fills one cell, and the last line says so. Only what keeps a device busy is in the grid;
    activations that move between devices stand below their device's line, in each cell during which they travel, and at
    least in the one in which they start: 0>4 is 0EVICT4, 0<4 is 0LOAD4.

    Args:
        timeline: a timeline from `simulate(schedule, costs)`.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> print(text(simulate(build("1f1b", num_devices=2, num_microbatches=2))), end="")
        0  0F0 0F1 ... ... 0B0 0B0 ... 0B1 0B1
        1  ... 1F0 1B0 1B0 1F1 1B1 1B1 ... ...
    """
    schedule = timeline.schedule
    columns = schedule.columns
    is_move = columns.is_kind(*PARKING_KINDS)
    is_shown = columns.is_kind(*COMPUTE_KINDS, *PARKING_KINDS)
    unit = _unit(timeline)
    place = "the host" if schedule.parks_on_host else "the paired device"
    notes = [f"(0>4: microbatch 4 of stage 0 leaves for {place}; 0<4: it comes back)\n"] * bool(is_move.any())
    if unit is None:
        timeline = simulate(schedule, _ONE_CELL)
        unit = 1.0
        notes.append("(not to scale: one cell an action, transfers take no time)\n")
    # A time that rounding has left just beside a whole number belongs to the cell of that number.
    start = np.floor(timeline.start / unit + 1e-6).astype(int)
    end = np.ceil(timeline.end / unit - 1e-6).astype(int)
    end[is_move] = np.maximum(end, start + 1)[is_move]
    num_cells = int(end[is_shown].max(initial=0))
    if schedule.num_devices * num_cells > _MOST_CELLS:
        return f"({schedule.num_devices:,} devices x {num_cells:,} cells are too many to draw: write the rows as csv)\n"
    actions = (action for row in schedule.rows for action in row)
    labels = [
        str(action).replace(action.kind.name, ARROWS.get(action.kind, action.kind.name)) + "+" * action.joined
        for action in actions
    ]
    notes += ["(0F4+: a pair, one action with the backward behind it)\n"] * schedule.has_pairs
    cell = max(map(len, [*(labels[i] for i in np.flatnonzero(is_shown & (end > start))), IDLE]))
    head = len(str(schedule.num_devices - 1))
    lines = []
    for device in range(schedule.num_devices):
        cells = [IDLE] * num_cells
        below: list[list[str]] = []  # lines of what moves; two that overlap in time need a line each
        for i in np.flatnonzero(is_shown & (columns.device == device)).tolist():
            here = slice(start[i], end[i])
            line = _first_free(below, here, num_cells) if is_move[i] else cells
            line[here] = [labels[i]] * (end[i] - start[i])
        for name, line in [(device, cells), *(("", line) for line in below)]:
            lines.append(f"{name:>{head}}  {' '.join(label.ljust(cell) for label in line)}".rstrip() + "\n")
    return "".join(lines + notes)


def _first_free(lines: list[list[str]], cells: slice, num_cells: int) -> list[str]:
    """The first of `lines` that is empty in `cells`; if there is none, a new line that is added to them."""
    for line in lines:
        if not any(line[cells]):
            return line
    lines.append([""] * num_cells)
    return lines[-1]


def _unit(timeline: Timeline) -> float | None:
    """The time of one cell; None if no unit gives a readable grid."""
    is_compute = timeline.schedule.columns.is_kind(*COMPUTE_KINDS)
    start = timeline.start[is_compute]
    end = timeline.end[is_compute]
    durations = end - start
    durations = durations[durations > 0]  # actions without time fill no cell, and give no unit
    if not len(durations):
        return 1.0
    unit = float(durations.min())
    cells = np.concatenate([start, end]) / unit
    is_whole = np.abs(cells - np.rint(cells)).max() < 1e-6
    return unit if is_whole and durations.max() / unit <= _MAX_CELLS_PER_ACTION else None
