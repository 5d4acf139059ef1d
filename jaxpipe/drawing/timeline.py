"""A timeline as a picture, drawn by matplotlib as SVG, PNG or PDF, and as Chrome trace events, to open in Perfetto.

The picture has one track per device, time to the right. Microbatch numbers stand in the actions that are wide enough
for them. Transfers between paired devices have a thin track below their device's own, with the number beside those that
are too short for it. Actions that take no time are thin marks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.drawing.pictures import INK, Style, add_axes, add_legend, encode, new_figure, styles
from jaxpipe.drawing.tracks import THIN, Boxes, Tracks, place_boxes, shortest_compute
from jaxpipe.schedules import NO_MICROBATCH, Kind, Timeline
from jaxpipe.schedules.schedule import COMPUTE_KINDS, WHOLE_BATCH_KINDS, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All lengths are in inches.
_TRACK = 0.26  # height
_GAP = 0.14  # between the boxes of two tracks, as a fraction of a track's height
_CELL = 0.20  # wished width of the shortest action
_CELL_WITH_TRANSFERS = 0.3  # the same if transfers are labelled
_WIDTHS = (7.0, 24.0)  # of the tracks: at least, at most
_MARGIN = (0.85, 0.2, 0.45, 0.62)  # left, right, top, bottom
_DIGIT = 0.075  # width of one digit of a label
_THIN_DIGIT = 0.05  # the same in a thin track
_MARK = 0.02  # width of an action that takes no time
_LEGEND_LINE = 0.2
_LEGEND_LETTER = 0.08  # width
_LEGEND_KEY = 0.35  # width
_POINTS = 72  # points of an inch


def svg(timeline: Timeline, *, unit: str = "") -> str:
    """The `<svg>` element of a picture of `timeline`, from `simulate(schedule, costs)`; its text can be searched.

    Args:
        timeline: of any schedule.
        unit: of its times, in words.
    """
    text = encode(_figure(timeline, unit), "svg").decode()
    return text[text.index("<svg") :]


def png(timeline: Timeline, *, unit: str = "") -> bytes:
    """The bytes of the same as PNG."""
    return encode(_figure(timeline, unit), "png")


def pdf(timeline: Timeline, *, unit: str = "") -> bytes:
    """The bytes of the same as PDF."""
    return encode(_figure(timeline, unit), "pdf")


def _figure(timeline: Timeline, unit: str) -> Figure:
    from matplotlib.patches import Patch

    schedule = timeline.schedule
    tracks = Tracks(schedule)
    makespan = timeline.makespan or 1.0  # of an empty schedule the axis still needs a length
    shortest = shortest_compute(timeline, tracks)
    cell = _CELL_WITH_TRANSFERS if tracks.has_thin.any() else _CELL
    tracks_width = float(np.clip(makespan / shortest * cell, *_WIDTHS))
    inches_per_time = tracks_width / makespan
    num_digits = np.char.str_len(schedule.columns.microbatch.astype(str))
    label_width = num_digits * np.where(tracks.is_thin, _THIN_DIGIT, _DIGIT) + 0.03
    boxes = place_boxes(timeline, tracks, mark=_MARK / inches_per_time, label=label_width / inches_per_time)

    shown = styles(schedule)
    longest_label = max((len(style.label) for style in shown), default=1)
    num_legend_columns = max(1, int(tracks_width / (_LEGEND_KEY + _LEGEND_LETTER * longest_label)))
    num_legend_lines = -(-len(shown) // num_legend_columns)
    left, right, top, bottom = _MARGIN
    bottom += _LEGEND_LINE * (num_legend_lines - 1)
    tracks_height = tracks.height * _TRACK

    figure = new_figure(left + tracks_width + right, top + tracks_height + bottom)
    axes = add_axes(figure, left, bottom, tracks_width, tracks_height)
    axes.set_xlim(0, makespan)
    axes.set_ylim(tracks.height, 0)
    _draw_tracks(axes, tracks)
    edge_width = min(0.4, 0.03 * shortest * inches_per_time * _POINTS)
    for style in shown:
        _draw_boxes(axes, style, tracks, boxes, edge_width)
        _write_numbers(axes, style, tracks, boxes)
    title = (
        f"{schedule.name}, {schedule.num_devices} devices, {schedule.num_microbatches} microbatches: "
        f"makespan {timeline.makespan:g}{unit and f' {unit}'}, bubble ratio {timeline.bubble_ratio:.2%}"
    )
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)
    handles = [Patch(facecolor=style.fill, label=style.label) for style in shown]
    add_legend(figure, handles, left, 0.06, num_columns=num_legend_columns, handle_length=1.2)
    return figure


def _draw_tracks(axes: Axes, tracks: Tracks) -> None:
    """Draws empty tracks, the name of the device or of its partner before each, and the axis of time below."""
    _, end = axes.get_xlim()
    axes.patch.set_visible(False)
    axes.tick_params(axis="x", labelsize=8, colors="#666666", length=3)
    axes.tick_params(axis="y", length=0, colors="#444444")
    axes.set_yticks(tracks.device_top + 0.5, [f"device {d}" for d in range(tracks.schedule.num_devices)], fontsize=8)
    thin_tops = tracks.device_top[tracks.has_thin] + 1
    for tops, height in ((tracks.device_top, 1.0), (thin_tops, THIN)):
        axes.barh(tops + height / 2, end, (1 - _GAP) * height, color="#f1f1ee", linewidth=0)
    for device, top in zip(np.flatnonzero(tracks.has_thin).tolist(), thin_tops.tolist(), strict=True):
        axes.text(
            -0.012,
            top + THIN / 2,
            _other_end(tracks.schedule, device),
            transform=axes.get_yaxis_transform(),
            color="#444444",
            fontsize=6,
            ha="right",
            va="center_baseline",
        )


def _other_end(schedule: Schedule, device: int) -> str:
    """Where the transfers of a device go to."""
    return "with its host" if schedule.parks_on_host else f"with device {schedule.placement.partner_of(device)}"


def _draw_boxes(axes: Axes, style: Style, tracks: Tracks, boxes: Boxes, edge_width: float) -> None:
    """Draws the actions of one style; those of a device are one path, which keeps files of large schedules small."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    devices = tracks.schedule.columns.device[style.actions]
    for device in np.unique(devices).tolist():
        actions = style.actions[devices == device]
        left = boxes.left[actions]
        right = boxes.right[actions]
        height = tracks.action_height[actions]
        low = tracks.action_top[actions] + _GAP / 2 * height
        high = low + (1 - _GAP) * height
        corners = np.stack([left, low, left, high, right, high, right, low, left, low], axis=1).reshape(-1, 2)
        codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(actions))
        patch = PathPatch(Path(corners, codes), facecolor=style.fill, edgecolor="#ffffff", linewidth=edge_width)
        axes.add_artist(patch)  # add_patch would measure each corner to find limits, which are set


def _write_numbers(axes: Axes, style: Style, tracks: Tracks, boxes: Boxes) -> None:
    """Writes the microbatches of the actions of one style, where there is room."""
    font_size = 5.5 if style.is_thin else 7
    middle = tracks.action_top + tracks.action_height / 2
    microbatch = tracks.schedule.columns.microbatch
    for action in style.actions[~np.isnan(boxes.label[style.actions])].tolist():
        axes.text(
            float(boxes.label[action]),
            float(middle[action]),
            str(microbatch[action]),
            color=INK if boxes.is_beside[action] else style.ink,
            fontsize=font_size,
            ha="center",
            va="center_baseline",
            parse_math=False,
        )


TRACE_TIME_PER_UNIT = 1000.0  # the format counts microseconds: one unit of cost is shown as 1 ms


def chrome_trace(timeline: Timeline) -> list[dict[str, object]]:
    """Trace events, one complete event per action; `json.dumps` writes the file.

    Every device is a named thread. A device that exchanges activations or gradients with its partner has a second
    thread for them, next to its own.

    Args:
        timeline: a timeline from `simulate(schedule, costs)`.

    Example:
        >>> from jaxpipe.schedules import build, simulate
        >>> event = chrome_trace(simulate(build("gpipe", num_devices=1, num_microbatches=1)))[-1]
        >>> event["name"], event["ts"], event["dur"]
        ('0B0', 1000.0, 2000.0)
    """
    schedule = timeline.schedule
    events: list[dict[str, object]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": schedule.name}}]
    for place, (thread, name) in enumerate(_threads(timeline).items()):
        metadata = {"ph": "M", "pid": 0, "tid": thread}
        events.append({**metadata, "name": "thread_name", "args": {"name": name}})
        events.append({**metadata, "name": "thread_sort_index", "args": {"sort_index": place}})
    start = (timeline.start * TRACE_TIME_PER_UNIT).tolist()
    duration = ((timeline.end - timeline.start) * TRACE_TIME_PER_UNIT).tolist()
    kinds = [kind.name for kind in Kind]
    index = 0
    for device, row in enumerate(schedule.rows):
        for action in row:
            args = {"stage": action.stage, "replica": action.replica}
            if action.microbatch != NO_MICROBATCH:
                args["batch" if action.kind in WHOLE_BATCH_KINDS else "microbatch"] = action.microbatch
            events.append(
                {
                    "name": str(action),
                    "cat": kinds[action.kind],
                    "ph": "X",
                    "ts": start[index],
                    "dur": duration[index],
                    "pid": 0,
                    # As in `_threads`: what moves is on the device's second thread, so that it overlaps no action.
                    "tid": device + schedule.num_devices * (action.kind not in COMPUTE_KINDS),
                    "args": args,
                }
            )
            index += 1
    return events


def _threads(timeline: Timeline) -> dict[int, str]:
    """Thread -> name, in the order in which they are shown; the second thread of device d is num_devices + d."""
    schedule = timeline.schedule
    names: dict[int, str] = {}
    for device, parks_pages in enumerate(Tracks(schedule).has_thin.tolist()):
        names[device] = f"device {device}"
        if parks_pages:
            names[schedule.num_devices + device] = f"device {device} {_other_end(schedule, device)}"
    return names
