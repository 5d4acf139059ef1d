"""A timeline as PNG, drawn by matplotlib, which is imported only here and only when called."""

from __future__ import annotations

import io

import numpy as np

from jaxpipe.schedules.render.palette import styles, title
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.simulate import Timeline

_DPI = 160
_LANE = 0.26  # inches
_CELL = 0.20  # wished width of the shortest action, inches
_WIDTHS = (7.0, 24.0)  # of the lanes, inches: at least, at most
_MARGIN = (0.85, 0.2, 0.45, 0.62)  # left, right, top, bottom, inches
_DIGIT = 0.075  # width of one digit of a label, inches
_MARK = 0.02  # width of an action that takes no time, inches
_LEGEND_LINE = 0.2


def png(schedule: Schedule, timeline: Timeline) -> bytes:
    """The bytes of a PNG picture; the same picture as `svg`.

    Args:
        schedule: what runs.
        timeline: when, from `simulate(schedule, costs)`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns, num_devices = schedule.columns, schedule.num_devices
    makespan = timeline.makespan or 1.0
    duration = timeline.end - timeline.start
    shortest = float(duration[duration > 0].min(initial=makespan))
    lanes_width = float(np.clip(makespan / shortest * _CELL, *_WIDTHS))
    inches_per_time = lanes_width / makespan
    shown = styles(schedule)
    num_legend_columns = max(1, int(lanes_width / (0.35 + 0.08 * max((len(s.label) for s in shown), default=1))))
    num_legend_lines = -(-len(shown) // num_legend_columns)
    left, right, top, bottom = _MARGIN
    bottom += _LEGEND_LINE * (num_legend_lines - 1)
    lanes_height = num_devices * _LANE
    width, height = left + lanes_width + right, top + lanes_height + bottom

    figure = Figure(figsize=(width, height), dpi=_DPI)
    axes = figure.add_axes((left / width, bottom / height, lanes_width / width, lanes_height / height))
    axes.set_facecolor("#f1f1ee")
    edge_width = min(0.4, 0.03 * shortest * inches_per_time * 72)  # points
    for style in shown:
        start = timeline.start[style.actions]
        end = np.maximum(timeline.end[style.actions], start + _MARK / inches_per_time)
        low, high = columns.device[style.actions] - 0.43, columns.device[style.actions] + 0.43
        corners = np.stack([start, low, start, high, end, high, end, low], axis=1).reshape(-1, 4, 2)
        axes.add_collection(
            PolyCollection(list(corners), facecolors=style.fill, edgecolors="#ffffff", linewidths=edge_width)
        )
        for index, a, b in zip(style.actions, start, end, strict=True):
            number = int(columns.microbatch[index])
            if number >= 0 and (b - a) * inches_per_time > len(str(number)) * _DIGIT + 0.03:
                axes.text(
                    (a + b) / 2,
                    int(columns.device[index]),
                    str(number),
                    color=style.ink,
                    fontsize=7,
                    ha="center",
                    va="center_baseline",
                )
    axes.set_xlim(0, makespan)
    axes.set_ylim(num_devices - 0.5, -0.5)
    axes.set_yticks(range(num_devices), [f"device {device}" for device in range(num_devices)], fontsize=8)
    axes.tick_params(axis="x", labelsize=8, colors="#666666", length=3)
    axes.tick_params(axis="y", length=0, colors="#444444")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(
        title(schedule, timeline.makespan, timeline.bubble_ratio), loc="left", fontsize=10, fontweight="bold"
    )
    figure.legend(
        handles=[Patch(facecolor=style.fill, label=style.label) for style in shown],
        loc="lower left",
        bbox_to_anchor=(left / width, 0.06 / height),
        ncols=num_legend_columns,
        fontsize=8,
        frameon=False,
        borderaxespad=0,
        handlelength=1.2,
    )
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()
