"""A timeline as SVG: one lane per device, time to the right; small enough for 10^5 actions."""

from __future__ import annotations

from html import escape

import numpy as np

from jaxpipe.schedules.analysis.simulate import Timeline
from jaxpipe.schedules.render.lanes import THIN, Lanes, Spans, shortest_action, spans
from jaxpipe.schedules.render.palette import Style, styles, title
from jaxpipe.schedules.schedule import Schedule

_LANE = 22.0  # all lengths in pixels
_GAP = 3.0
_LEFT = 74.0
_TOP = 44.0
_RIGHT = 16.0
_MARK = 2.0  # width of an action that takes no time
_DIGIT = 5.6  # width of one digit of a label
_THIN_DIGIT = 4.6  # the same in the lane of transfers
_WIDTHS = (640.0, 2400.0)  # of the lanes: at least, at most
_CELL = 18.0  # wished width of the shortest action
_CELL_WITH_MOVES = 30.0  # wished width where numbers of transfers are to be read
_DROP = 3.7  # from the middle of a line of text to its baseline; renderers differ on dominant-baseline
_THIN_DROP = 2.8
_NUM_TICKS = 10
_INK = "#1a1a1a"


def svg(schedule: Schedule, timeline: Timeline) -> str:
    """The text of an SVG picture.

    Microbatch numbers stand in the actions that are wide enough for them. EVICT, LOAD and SYNC have a thin
    lane below their device's own, with the number beside those that are too short. Actions that take no time
    are thin marks.

    Args:
        schedule: what runs.
        timeline: when, from `simulate(schedule, costs)`.
    """
    columns, lanes = schedule.columns, Lanes(schedule)
    makespan = timeline.makespan or 1.0
    shortest = shortest_action(timeline, lanes)
    cell = _CELL_WITH_MOVES if lanes.has_moves.any() else _CELL
    lanes_width = float(np.clip(makespan / shortest * cell, *_WIDTHS))
    scale = lanes_width / makespan
    label_width = np.char.str_len(columns.microbatch.astype(str)) * np.where(lanes.is_move, _THIN_DIGIT, _DIGIT) + 2
    places = spans(timeline, lanes, mark=_MARK / scale, label=label_width / scale)
    left = _LEFT + places.left * scale
    width = (places.right - places.left) * scale
    top = _TOP + lanes.action_top * _LANE + _GAP / 2
    bottom = _TOP + lanes.height * _LANE

    shapes, labels, legend, legend_left, legend_row = [], [], [], _LEFT, 0
    for style in styles(schedule):
        x, y, w = (values[style.actions].tolist() for values in (left, top, width))
        height = float(lanes.action_height[style.actions[0]]) * _LANE - _GAP
        boxes = "".join(f"M{a:.6g} {b:g}h{c:.5g}v{height:g}h-{c:.5g}z" for a, b, c in zip(x, y, w, strict=True))
        shapes.append(f'<path fill="{style.fill}" d="{boxes}"/>')
        labels += _labels(style, places, columns.microbatch, _LEFT, scale, top + height / 2)
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
            f'<text x="{_LEFT:g}" y="26" font-size="14" font-weight="bold" fill="{_INK}">'
            f"{escape(title(schedule, timeline.makespan, timeline.bubble_ratio))}</text>",
            *_axes(lanes, makespan, scale, bottom),
            f'<g stroke="#ffffff" stroke-width="{min(0.6, 0.04 * shortest * scale):.3g}">',
            *shapes,
            "</g>",
            '<g text-anchor="middle" font-size="10">',
            *labels,
            "</g>",
            f'<g fill="{_INK}">',
            *legend,
            "</g>",
            "</svg>\n",
        ]
    )


def _labels(
    style: Style, places: Spans, microbatch: np.ndarray, left: float, scale: float, middle: np.ndarray
) -> list[str]:
    """Microbatch numbers in the actions of one style, and beside those transfers that are too short for theirs.

    Args:
        middle: [A] height of the middle of each action.
    """
    drop, size = (_THIN_DROP, ' font-size="8"') if style.is_move else (_DROP, "")
    groups = []
    for ink, chosen in ((style.ink, ~places.is_beside), (_INK, places.is_beside)):
        actions = style.actions[(chosen & ~np.isnan(places.label))[style.actions]]
        x, y = left + places.label[actions] * scale, middle[actions] + drop
        texts = "".join(
            f'<text x="{a:.6g}" y="{b:g}">{number}</text>'
            for a, b, number in zip(x.tolist(), y.tolist(), microbatch[actions].tolist(), strict=True)
        )
        if texts:
            groups.append(f'<g fill="{ink}"{size}>{texts}</g>')
    return groups


def _axes(lanes: Lanes, makespan: float, scale: float, bottom: float) -> list[str]:
    """Lanes with the device's name before them, and ticks of time below."""
    tops = (_TOP + lanes.device_top * _LANE).tolist()
    thin = [(device, top + _LANE) for device, top in enumerate(tops) if lanes.has_moves[device]]
    lines = ['<g fill="#f1f1ee">']
    for height, y in [(_LANE, top) for top in tops] + [(THIN * _LANE, top) for _, top in thin]:
        lines.append(
            f'<rect x="{_LEFT:g}" y="{y + _GAP / 2:g}" width="{makespan * scale:g}" height="{height - _GAP:g}"/>'
        )
    lines += ["</g>", '<g fill="#444444" text-anchor="end">']
    for device, y in enumerate(tops):
        lines.append(f'<text x="{_LEFT - 8:g}" y="{y + 0.5 * _LANE + _DROP:g}">device {device}</text>')
    for device, y in thin:
        partner = lanes.schedule.placement.partner_of(device)
        y += 0.5 * THIN * _LANE + _THIN_DROP
        lines.append(f'<text x="{_LEFT - 8:g}" y="{y:g}" font-size="8">with device {partner}</text>')
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
