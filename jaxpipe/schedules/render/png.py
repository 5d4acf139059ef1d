"""A timeline as PNG, drawn by matplotlib, which is imported only here and only when called."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.schedules.analysis.simulate import Timeline
from jaxpipe.schedules.render.lanes import THIN, Lanes, Spans, shortest_action, spans
from jaxpipe.schedules.render.palette import Style, styles, title
from jaxpipe.schedules.schedule import Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 160
_LANE = 0.26  # inches
_CELL = 0.20  # wished width of the shortest action, inches
_CELL_WITH_MOVES = 0.3  # the same where numbers of transfers are to be read
_WIDTHS = (7.0, 24.0)  # of the lanes, inches: at least, at most
_MARGIN = (0.85, 0.2, 0.45, 0.62)  # left, right, top, bottom, inches
_DIGIT = 0.075  # width of one digit of a label, inches
_THIN_DIGIT = 0.05  # the same in the lane of transfers
_MARK = 0.02  # width of an action that takes no time, inches
_LEGEND_LINE = 0.2


def png(schedule: Schedule, timeline: Timeline) -> bytes:
    """The bytes of a PNG picture; the same picture as `svg`.

    Args:
        schedule: what runs.
        timeline: when, from `simulate(schedule, costs)`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    columns, lanes = schedule.columns, Lanes(schedule)
    makespan = timeline.makespan or 1.0
    shortest = shortest_action(timeline, lanes)
    cell = _CELL_WITH_MOVES if lanes.has_moves.any() else _CELL
    lanes_width = float(np.clip(makespan / shortest * cell, *_WIDTHS))
    inches_per_time = lanes_width / makespan
    num_digits = np.char.str_len(columns.microbatch.astype(str))
    label_width = num_digits * np.where(lanes.is_move, _THIN_DIGIT, _DIGIT) + 0.03
    places = spans(timeline, lanes, mark=_MARK / inches_per_time, label=label_width / inches_per_time)
    shown = styles(schedule)
    num_legend_columns = max(1, int(lanes_width / (0.35 + 0.08 * max((len(s.label) for s in shown), default=1))))
    num_legend_lines = -(-len(shown) // num_legend_columns)
    left, right, top, bottom = _MARGIN
    bottom += _LEGEND_LINE * (num_legend_lines - 1)
    lanes_height = lanes.height * _LANE
    width, height = left + lanes_width + right, top + lanes_height + bottom

    figure = Figure(figsize=(width, height), dpi=_DPI)
    axes = figure.add_axes((left / width, bottom / height, lanes_width / width, lanes_height / height))
    axes.set_facecolor("#f1f1ee")
    edge_width = min(0.4, 0.03 * shortest * inches_per_time * 72)  # points
    for style in shown:
        _draw(axes, style, lanes, places, edge_width)
    axes.set_xlim(0, makespan)
    axes.set_ylim(lanes.height, 0)
    _name_lanes(axes, lanes)
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


def _draw(axes: Axes, style: Style, lanes: Lanes, places: Spans, edge_width: float) -> None:
    """The actions of one style, with their numbers where there is room."""
    from matplotlib.collections import PolyCollection

    left, right = places.left[style.actions], places.right[style.actions]
    middle = lanes.action_top[style.actions] + lanes.action_height[style.actions] / 2
    half = 0.43 * lanes.action_height[style.actions]
    low, high = middle - half, middle + half
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    axes.add_collection(
        PolyCollection(list(corners), facecolors=style.fill, edgecolors="#ffffff", linewidths=edge_width)
    )
    font_size = 5.5 if style.is_move else 7
    for index, y in zip(style.actions.tolist(), middle.tolist(), strict=True):
        x = float(places.label[index])
        if not np.isnan(x):
            ink = "#1a1a1a" if places.is_beside[index] else style.ink
            number = str(lanes.schedule.columns.microbatch[index])
            axes.text(x, y, number, color=ink, fontsize=font_size, ha="center", va="center_baseline")


def _name_lanes(axes: Axes, lanes: Lanes) -> None:
    """Devices before their lanes, and paired devices before those of transfers."""
    axes.set_yticks(
        lanes.device_top + 0.5, [f"device {device}" for device in range(lanes.schedule.num_devices)], fontsize=8
    )
    for device in np.flatnonzero(lanes.has_moves).tolist():
        axes.text(
            -0.012,
            lanes.device_top[device] + 1 + THIN / 2,
            f"with device {lanes.schedule.placement.partner_of(device)}",
            transform=axes.get_yaxis_transform(),
            color="#444444",
            fontsize=6,
            ha="right",
            va="center_baseline",
        )
