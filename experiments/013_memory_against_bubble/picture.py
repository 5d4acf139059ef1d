"""The picture: bubble against memory, one panel for each of the costs.

Goes in: points, and curves of what `optimize` finds. Comes out: a PNG, drawn by matplotlib. Its text chunk holds the
points and curves as JSON, so that a file shows whether it is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from labels import label

from experiments.png import png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _PANEL = 9.4, 5.6  # inches
_MARGIN = (0.75, 0.15, 0.85, 1.0)  # left, right, top, bottom, inches
_GAP = 0.75  # between panels, inches
_DPI = 130
_NUM_PLACES = 200  # on each straight piece of a line
_MEMORY, _BUBBLE = (3.6, 40.0), (0.6, 45.0)  # limits of the axes: Ma, percent
_MEMORY_TICKS = (4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 32)
_BUBBLE_TICKS = (0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30)
_MARKS = {(1, False): "o", (2, False): "D", (1, True): "^"}  # (replicas, transfers)
_WHOLE, _HALVES = "#b5352c", "#1b6ca8"
_FRONTIER = {"color": "#888888", "linewidth": 5.0, "alpha": 0.35, "linestyle": "-"}
_CURVES = {
    "any": {"color": "#1a1a1a", "linewidth": 1.5, "linestyle": "-"},
    "V": {"color": "#c77d11", "linewidth": 1.5, "linestyle": (0.0, (4.0, 2.0))},
}
_CURVE_NAMES = {"any": "optimize, any placement", "V": "optimize, V alone"}


@dataclass(frozen=True)
class Point:
    """One schedule.

    Attributes:
        text: its label; schedules at the same place share one.
        peak: in Ma.
        bubble_ratio: on the asynchronous clock.
        num_replicas: of the weights.
        parks_pages: whether EVICT and LOAD move activations.
        has_split_backward: whether backwards are in two parts.
    """

    text: str
    peak: float
    bubble_ratio: float
    num_replicas: int
    parks_pages: bool
    has_split_backward: bool


@dataclass(frozen=True)
class Panel:
    """What is drawn for one of the costs.

    Attributes:
        title: the costs.
        points: schedules.
        curves: placements -> (bound in Ma, bubble ratio), by rising bound.
    """

    title: str
    points: tuple[Point, ...]
    curves: Mapping[str, tuple[tuple[float, float], ...]]


def content(panels: Sequence[Panel]) -> str:
    """What a picture of `panels` says of itself; ratios as the table has them."""
    return json.dumps([asdict(panel) for panel in panels], default=list, sort_keys=True)


def draw(panels: Sequence[Panel]) -> bytes:
    """The bytes of a PNG.

    Raises:
        ValueError: there is no room for a label.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    left, right, top, bottom = _MARGIN
    height = bottom + len(panels) * _PANEL + (len(panels) - 1) * _GAP + top
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI)
    FigureCanvasAgg(figure)
    for index, panel in enumerate(panels):
        floor = height - top - (index + 1) * _PANEL - index * _GAP
        axes = figure.add_axes(
            (left / _WIDTH, floor / height, (_WIDTH - left - right) / _WIDTH, _PANEL / height), label=panel.title
        )
        _draw_axes(axes, panel.title)
        _draw_points(axes, panel.points, lines=_draw_curves(axes, panel))
    figure.text(
        left / _WIDTH, 1 - 0.3 / height, "Bubble against memory, 8 devices, 32 microbatches", fontsize=12, weight="bold"
    )
    _draw_legend(figure, left / _WIDTH, 0.06 / height)
    return png_of(figure, content=content(panels))


def _draw_axes(axes: Axes, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*_MEMORY)
    axes.set_ylim(*_BUBBLE)
    axes.set_xticks(_MEMORY_TICKS, [f"{tick:g}" for tick in _MEMORY_TICKS], fontsize=8)
    axes.set_yticks(_BUBBLE_TICKS, [f"{tick:g} %" for tick in _BUBBLE_TICKS], fontsize=8)
    axes.minorticks_off()
    axes.grid(color="#e6e6e2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#444444", length=3)
    axes.set_xlabel("peak activations of a device, Ma (activations of one microbatch), logarithmic", fontsize=9)
    axes.set_ylabel("bubble ratio, logarithmic", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_curves(axes: Axes, panel: Panel) -> np.ndarray:
    """Steps: what keeps a bound keeps every larger one. Returns [L, 2] places on them, close together."""
    reached = frontier([(point.peak, point.bubble_ratio) for point in panel.points])
    lines = [_steps(axes, reached, _FRONTIER)]
    lines += [_steps(axes, frontier(curve), _CURVES[name]) for name, curve in panel.curves.items()]
    return np.concatenate(lines)


def frontier(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (memory, bubble ratio) those to which no other one is equal or better in both, by rising memory."""
    best: list[tuple[float, float]] = []
    for memory, ratio in sorted(places):
        if not best or ratio < best[-1][1]:
            best.append((memory, ratio))
    return best


def _steps(axes: Axes, places: Sequence[tuple[float, float]], style: Mapping[str, object]) -> np.ndarray:
    memory, ratio = np.array([*places, (_MEMORY[1], places[-1][1])]).T
    corners = np.column_stack([np.repeat(memory, 2)[1:], np.repeat(100 * ratio, 2)[:-1]])
    axes.plot(*corners.T, **style)  # pyright: ignore[reportArgumentType]
    ways = [np.geomspace(*pair, num=_NUM_PLACES) for pair in pairwise(corners)]
    return np.concatenate(ways)


def _draw_points(axes: Axes, points: Sequence[Point], *, lines: np.ndarray) -> None:
    """Marks and labels; what lies outside the axes stands at their edge, with its place beside it."""
    by_place: dict[tuple[float, float], list[str]] = {}
    for point in points:
        place, text = (point.peak, 100 * point.bubble_ratio), point.text
        if place != (shown := _inside(place)):
            text = f"{text}, off the page: {place[0]:g} Ma, {place[1]:.0f} %"
        colour = _HALVES if point.has_split_backward else _WHOLE
        mark = _MARKS[point.num_replicas, point.parks_pages]
        axes.plot(*shown, mark, markersize=6, color=colour, markerfacecolor=colour, markeredgecolor="#ffffff")
        by_place.setdefault((round(shown[0], 6), round(shown[1], 6)), []).append(text)
    places = np.array(list(by_place))
    order = np.lexsort((places[:, 1], -_crowd(places)))
    texts = ["\n".join(texts) for texts in by_place.values()]
    label(axes, places[order], [texts[i] for i in order], lines=lines, font_size=8)


def _inside(place: tuple[float, float]) -> tuple[float, float]:
    memory, ratio = place
    return max(memory, 1.015 * _MEMORY[0]), min(ratio, 0.97 * _BUBBLE[1])


def _crowd(places: np.ndarray) -> np.ndarray:
    """[P] how many others have the same memory: these have least room and are labelled first."""
    return (np.abs(places[:, None, 0] - places[None, :, 0]) < 0.6).sum(axis=1)


def _draw_legend(figure: Figure, x: float, y: float) -> None:
    from matplotlib.lines import Line2D

    def marked(mark: str, colour: str, name: str) -> Line2D:
        return Line2D([], [], marker=mark, linestyle="", color=colour, markeredgecolor="#ffffff", label=name)

    handles = [
        marked("s", _WHOLE, "whole backwards"),
        marked("s", _HALVES, "backwards in two parts"),
        marked("o", "#444444", "one replica of the weights"),
        marked("D", "#444444", "two replicas of the weights"),
        marked("^", "#444444", "activations travel (EVICT, LOAD)"),
        Line2D([], [], label="frontier of the schedules", **_FRONTIER),  # pyright: ignore[reportArgumentType]
        *(Line2D([], [], label=_CURVE_NAMES[name], **style) for name, style in _CURVES.items()),  # pyright: ignore[reportArgumentType]
    ]
    figure.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(x, y),
        ncols=3,
        fontsize=8.5,
        frameon=False,
        borderaxespad=0,
        handlelength=2.2,
    )
