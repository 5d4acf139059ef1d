"""A timeline as SVG: one lane per device, time to the right; small enough for 10^5 actions."""

from __future__ import annotations

from html import escape

import numpy as np

from jaxpipe.schedules.render.palette import styles, title
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.simulate import Timeline

_LANE = 22.0  # all lengths in pixels
_GAP = 3.0
_LEFT = 74.0
_TOP = 44.0
_RIGHT = 16.0
_MARK = 2.0  # width of an action that takes no time
_DIGIT = 5.6  # width of one digit of a label
_WIDTHS = (640.0, 2400.0)  # of the lanes: at least, at most
_CELL = 18.0  # wished width of the shortest action
_DROP = 3.7  # from the middle of a line of text to its baseline; renderers differ on dominant-baseline
_NUM_TICKS = 10


def svg(schedule: Schedule, timeline: Timeline) -> str:
    """The text of an SVG picture.

    Microbatch numbers stand in the actions that are wide enough for them. Actions that take no time are
    thin marks.

    Args:
        schedule: what runs.
        timeline: when, from `simulate(schedule, costs)`.
    """
    columns = schedule.columns
    makespan = timeline.makespan or 1.0
    duration = timeline.end - timeline.start
    shortest = float(duration[duration > 0].min(initial=makespan))
    lanes_width = float(np.clip(makespan / shortest * _CELL, *_WIDTHS))
    scale = lanes_width / makespan
    left = _LEFT + timeline.start * scale
    width = np.maximum(duration * scale, _MARK)
    top = _TOP + columns.device * _LANE + _GAP / 2
    height = _LANE - _GAP
    bottom = _TOP + schedule.num_devices * _LANE

    shapes, labels, legend, legend_left, legend_row = [], [], [], _LEFT, 0
    for style in styles(schedule):
        x, y, w = (values[style.actions].tolist() for values in (left, top, width))
        boxes = "".join(f"M{a:.6g} {b:g}h{c:.5g}v{height:g}h-{c:.5g}z" for a, b, c in zip(x, y, w, strict=True))
        shapes.append(f'<path fill="{style.fill}" d="{boxes}"/>')
        numbers = columns.microbatch[style.actions].tolist()
        texts = "".join(
            f'<text x="{a + c / 2:.6g}" y="{b + height / 2 + _DROP:g}">{n}</text>'
            for a, b, c, n in zip(x, y, w, numbers, strict=True)
            if n >= 0 and c > len(str(n)) * _DIGIT + 2
        )
        if texts:
            labels.append(f'<g fill="{style.ink}">{texts}</g>')
        length = 24 + 6.2 * len(style.label)
        if legend_left > _LEFT and legend_left + length > _LEFT + lanes_width:
            legend_left, legend_row = _LEFT, legend_row + 1
        legend_top = bottom + 36 + 18 * legend_row
        legend.append(
            f'<rect x="{legend_left:g}" y="{legend_top:g}" width="12" height="12" fill="{style.fill}"/>'
            f'<text x="{legend_left + 17:g}" y="{legend_top + 6 + _DROP:g}">{escape(style.label)}</text>'
        )
        legend_left += length + 12
    total_width, total_height = _LEFT + lanes_width + _RIGHT, bottom + 60 + 18 * legend_row
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{total_width:g}" height="{total_height:g}" '
            f'viewBox="0 0 {total_width:g} {total_height:g}" '
            'font-family="Helvetica, Arial, sans-serif" font-size="11">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            f'<text x="{_LEFT:g}" y="26" font-size="14" font-weight="bold" fill="#1a1a1a">'
            f"{escape(title(schedule, timeline.makespan, timeline.bubble_ratio))}</text>",
            *_axes(schedule.num_devices, makespan, scale, bottom),
            f'<g stroke="#ffffff" stroke-width="{min(0.6, 0.04 * shortest * scale):.3g}">',
            *shapes,
            "</g>",
            '<g text-anchor="middle" font-size="10">',
            *labels,
            "</g>",
            '<g fill="#1a1a1a">',
            *legend,
            "</g>",
            "</svg>\n",
        ]
    )


def _axes(num_devices: int, makespan: float, scale: float, bottom: float) -> list[str]:
    """Lanes with the device's name before them, and ticks of time below."""
    lines = ['<g fill="#f1f1ee">']
    for device in range(num_devices):
        y = _TOP + device * _LANE + _GAP / 2
        lines.append(f'<rect x="{_LEFT:g}" y="{y:g}" width="{makespan * scale:g}" height="{_LANE - _GAP:g}"/>')
    lines += ["</g>", '<g fill="#444444" text-anchor="end">']
    for device in range(num_devices):
        y = _TOP + (device + 0.5) * _LANE
        lines.append(f'<text x="{_LEFT - 8:g}" y="{y + _DROP:g}">device {device}</text>')
    lines += ["</g>", '<g fill="#666666" stroke="none" text-anchor="middle" font-size="10">']
    step = _round_step(makespan / _NUM_TICKS)
    for i in range(int(makespan / step + 1e-9) + 1):
        x = _LEFT + i * step * scale
        lines.append(f'<rect x="{x:g}" y="{bottom:g}" width="0.8" height="4"/>')
        lines.append(f'<text x="{x:g}" y="{bottom + 13 + _DROP:g}">{i * step:g}</text>')
    lines.append("</g>")
    return lines


def _round_step(step: float) -> float:
    """The least of 1, 2, 5, 10, ... that is at least `step`."""
    power = 10.0 ** np.floor(np.log10(step))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9)))
