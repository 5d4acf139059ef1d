"""A picture of what every device stores over a step: BPipe's memory figures, for any schedules side by side.

One column for each timeline: on every device the areas of its own, the parked and the travelling activations, one
upon the other. A last column shows the peaks as bars.

              1f1b            bpipe           peak
                ____           ____
    device 0  _|    |__      _|    |__        ####  4 1f1b
                                              ###   3 bpipe
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.drawing.pictures import INK, STORED, add_axes, add_legend, encode, new_figure
from jaxpipe.schedules import Stored, Timeline, stored
from jaxpipe.schedules.analysis.activations import in_largest
from jaxpipe.units import GIB, gib

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_DASHED = {"colors": INK, "linewidths": 0.9, "linestyles": (0.0, (4.0, 2.0))}
# widths of a column, inches
_AREAS = 5.6
_BARS = 1.6
_DEVICE = (0.3, 0.62)  # height of a device, inches: at least, at most
_DEVICES = 7.0  # wished height of all devices, inches
_GAP = 0.55  # between columns, inches
_LETTER = 0.062  # width in a label beside a bar, inches
_MARGIN = (1.0, 0.2, 0.8, 0.85)  # left, right, top, bottom, inches
_AIR = 1.22  # height of a device / largest number of stored slots
_INSTANT = 1e-9  # fraction of the makespan; anything shorter is rounding


def memory(
    timelines: Sequence[Timeline],
    *,
    bound: float | None = None,
    slot_bytes: float | Sequence[int] | None = None,
    file_format: str = "png",
    unit: str = "",
) -> bytes:
    """The bytes of a picture of stored slots; a slot holds the activations of one microbatch on one stage.

    All schedules run the same model, and slots are those of the last one: where another has twice as many stages, two
    of its own are one.

    Args:
        timelines: one or more timelines, of schedules with the same number of devices.
        bound: slots, drawn as a line.
        slot_bytes: bytes of a slot, or [stage] those of each stage of the last schedule, of which the largest is then
            the unit, also of the others; if given, the picture shows GiB beside slots.
        file_format: "png", "svg" or "pdf".
        unit: of the times, in words.
    """
    schedules = [timeline.schedule for timeline in timelines]
    # A stage of a schedule with twice as many stages has half the layers, so its slot is half of one here.
    of_last = [schedules[-1].num_stages / schedule.num_stages for schedule in schedules]
    columns = [
        [values.times(ratio) for values in stored(timeline)] for timeline, ratio in zip(timelines, of_last, strict=True)
    ]
    if isinstance(slot_bytes, Sequence):
        columns[-1] = in_largest(stored(timelines[-1], slot_bytes), slot_bytes)
        slot_bytes = max(slot_bytes)
    peaks = [values.total.max(initial=0.0) for column in columns for values in column]
    scale = _Scale(len(columns[0]), float(max([bound or 0.0, *peaks])) or 1.0, bound, slot_bytes)
    labels = [
        [scale.label(values, schedule.name) for values in column]
        for schedule, column in zip(schedules, columns, strict=True)
    ]
    num_letters = max(len(label) for column in labels for label in column)

    left, right, top, bottom = _MARGIN
    height = scale.num_devices * float(np.clip(_DEVICES / scale.num_devices, *_DEVICE))
    widths = [_AREAS] * len(columns) + [_BARS + _LETTER * num_letters]
    size = (left + sum(widths) + _GAP * len(columns) + right, bottom + height + top)
    figure = new_figure(*size)
    x = left
    all_axes = []
    for width in widths:
        axes = add_axes(figure, x, bottom, width, height)
        _draw_devices(axes, scale)
        all_axes.append(axes)
        x += width + _GAP

    end = max(timeline.makespan for timeline in timelines) or 1.0
    # Not strict: the last axes are those of the bars.
    for axes, timeline, column in zip(all_axes, timelines, columns, strict=False):
        axes.set_xlim(0, end)
        axes.set_xlabel(f"time, {unit}" if unit else "time", fontsize=8, color="#444444")
        axes.set_title(
            f"{timeline.schedule.name}, makespan {timeline.makespan:g}", loc="left", fontsize=9, parse_math=False
        )
        _draw_areas(axes, column, scale, least_time=end * _INSTANT)
        _mark_devices(axes, scale, with_names=axes is all_axes[0])
    if slot_bytes:
        _mark_bytes(all_axes[-2], scale)
    _draw_bars(all_axes[-1], columns, labels, scale)
    all_axes[-1].set_xlim(0, 1.05 * scale.most * widths[-1] / _BARS)

    title = f"Slots stored on each of {scale.num_devices} devices, {schedules[0].num_microbatches} microbatches"
    title += f", {gib(slot_bytes, '.3g')} GiB a slot" if slot_bytes else ""
    title += f" (slots of {schedules[-1].name})" if set(of_last) != {1.0} else ""
    figure.text(left / size[0], 1 - 0.3 / size[1], title, fontsize=11, fontweight="bold", parse_math=False)
    handles = _legend_handles(bound)
    add_legend(figure, handles, left, 0.08, num_columns=len(handles), handle_length=1.6)
    return encode(figure, file_format)


@dataclass(frozen=True)
class _Scale:
    """The scale that all columns share; heights are in slots."""

    num_devices: int
    most: float  # the largest number of slots that any device ever stores, or the bound if that is larger
    bound: float | None
    slot_bytes: float | None

    @property
    def device_height(self) -> float:
        """Height of a device, with air above the most that is stored."""
        return _AIR * self.most

    @property
    def floors(self) -> np.ndarray:
        """[device] lower edge, from which its storage is drawn upwards."""
        return np.arange(1, self.num_devices + 1) * self.device_height

    @property
    def mark(self) -> float:
        """The number of slots that is marked beside each device."""
        return self.bound or self.most

    def label(self, values: Stored, name: str) -> str:
        """The peak of a device under the schedule `name`, in words."""
        peak = float(values.total.max(initial=0.0))
        return f"{peak:.3g}{self.size(peak, ' ({:.3g} GiB)')} {name}"

    def size(self, slots: float, template: str) -> str:
        """The size of `slots` in GiB, written into `template`; empty where the size of a slot is not known."""
        return template.format(slots * self.slot_bytes / GIB) if self.slot_bytes else ""


def _draw_devices(axes: Axes, scale: _Scale) -> None:
    """Draws an empty strip for each device."""
    axes.set_ylim(scale.floors[-1], 0)
    axes.set_facecolor("#f7f7f5")
    axes.tick_params(colors="#444444", labelsize=8, length=3)
    for floor in scale.floors[:-1]:
        axes.axhline(floor, color="#ffffff", linewidth=2)


def _draw_areas(axes: Axes, column: Sequence[Stored], scale: _Scale, *, least_time: float) -> None:
    """Draws what each device stores over time, one part upon the other, and the bound."""
    for floor, values in zip(scale.floors, column, strict=True):
        shown = values.lasting(least_time)
        base = np.full(len(shown.time), floor)
        for part, (colour, _) in STORED.items():
            upper = base - getattr(shown, part)
            axes.fill_between(shown.time, base, upper, step="post", color=colour, linewidth=0)
            base = upper
    if scale.bound is not None:
        axes.hlines(scale.floors - scale.bound, *axes.get_xlim(), **_DASHED)


def _draw_bars(axes: Axes, columns: Sequence[Sequence[Stored]], labels: Sequence[Sequence[str]], scale: _Scale) -> None:
    """Draws the parts of what each device stores at its peak, a bar for each schedule, and the bound."""
    from matplotlib.ticker import MaxNLocator

    step = 0.8 * scale.device_height / len(columns)
    font_size = min(7.0, 3.0 + 24.0 / len(columns) * min(1.0, 8.0 / scale.num_devices))
    for index, column in enumerate(columns):
        y = scale.floors - 0.9 * scale.device_height + (index + 0.5) * step
        # The first moment of the peak; a device without actions has no moment at all.
        worst = [values.total.argmax() if len(values.total) else None for values in column]
        start = np.zeros(scale.num_devices)
        for part, (colour, _) in STORED.items():
            amount = np.array(
                [0.0 if i is None else getattr(values, part)[i] for values, i in zip(column, worst, strict=True)]
            )
            axes.barh(y, amount, 0.86 * step, left=start, color=colour, linewidth=0)
            start += amount
        for height, label in zip(y, labels[index], strict=True):
            look = {"fontsize": font_size, "va": "center_baseline", "color": INK, "parse_math": False}
            axes.text(1.05 * scale.most, height, label, **look)
    axes.set_title("peak", loc="left", fontsize=9)
    axes.set_yticks([])
    axes.set_xticks([tick for tick in MaxNLocator(4, integer=True).tick_values(0, scale.most) if tick <= scale.most])
    axes.set_xlabel("slots", fontsize=8, color="#444444", loc="left")
    if scale.bound is not None:
        axes.vlines([scale.bound], *axes.get_ylim(), **_DASHED)


def _mark_devices(axes: Axes, scale: _Scale, *, with_names: bool) -> None:
    """Writes 0 and the marked number of slots beside each device, and its name if `with_names`."""
    names = [f"device {device}" if with_names else "" for device in range(scale.num_devices)]
    axes.set_yticks(scale.floors - scale.mark / 2, names, fontsize=8)
    axes.tick_params(axis="y", which="major", length=0, pad=16)
    marks = np.stack([scale.floors, scale.floors - scale.mark], axis=1).ravel()
    axes.set_yticks(marks, ["0", f"{scale.mark:.3g}"] * scale.num_devices, minor=True)
    axes.tick_params(axis="y", which="minor", length=2, labelsize=6, colors="#444444")


def _mark_bytes(axes: Axes, scale: _Scale) -> None:
    """Writes the size of the marked number of slots to the right of each device."""
    right = axes.secondary_yaxis("right")
    right.set_yticks(scale.floors - scale.mark, [scale.size(scale.mark, "{:.3g} GiB")] * scale.num_devices)
    right.tick_params(length=2, labelsize=6, colors="#444444")
    right.spines["right"].set_visible(False)


def _legend_handles(bound: float | None) -> list[Patch | Line2D]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = [Patch(facecolor=colour, label=name) for colour, name in STORED.values()]
    if bound is not None:
        line = {"color": _DASHED["colors"], "linewidth": _DASHED["linewidths"], "linestyle": _DASHED["linestyles"]}
        handles.append(Line2D([], [], label=f"bound, {bound:g} slots", **line))
    return handles
