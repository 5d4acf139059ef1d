"""The picture: peaks on 8 A100 beside those that were measured, and what PCIe costs by the bandwidth that is reached.

Goes in: figures. Comes out: a PNG, drawn by matplotlib. Its text chunk holds the figures as JSON, so that a file shows
whether it is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from experiments.png import png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinct to colour-blind readers (after Okabe and Ito, 2008), and apart in lightness.
_COLOURS = ("#b5352c", "#9ccbea", "#1b6ca8", "#c9c9c4")
_LINES: tuple[dict[str, object], ...] = (
    {"color": "#1b6ca8", "linestyle": "-", "marker": "o"},
    {"color": "#b5352c", "linestyle": "--", "marker": "s"},
    {"color": "#c77d11", "linestyle": ":", "marker": "D"},
    {"color": "#1a1a1a", "linestyle": "-.", "marker": "^"},
    {"color": "#8e5a9e", "linestyle": (0, (5, 1)), "marker": "v"},
)


@dataclass(frozen=True)
class Figures:
    """What is drawn.

    Attributes:
        sizes: of the models.
        peaks: name of a way to train -> [size] GB.
        measured: name of a way to train -> (index of the size, GB).
        limit: GB that a device has for a step.
        bandwidths: GB/s, rising.
        slowdowns: name of a way to move activations -> [bandwidth] step over step without BPipe.
        band: the measured slowdowns, least and most.
    """

    sizes: Sequence[str]
    peaks: Mapping[str, Sequence[float]]
    measured: Mapping[str, tuple[int, float]]
    limit: float
    bandwidths: Sequence[float]
    slowdowns: Mapping[str, Sequence[float]]
    band: tuple[float, float]


def content(figures: Figures) -> str:
    """What a picture of `figures` says of itself."""
    return json.dumps(asdict(figures), sort_keys=True)


def draw(figures: Figures) -> bytes:
    """The bytes of a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_peaks(left, figures)
    _draw_slowdowns(right, figures)
    return png_of(figure, content=content(figures))


def _draw_peaks(axes: Axes, figures: Figures) -> None:
    width = 0.8 / len(figures.peaks)
    for index, (name, peaks) in enumerate(figures.peaks.items()):
        places = [size + (index - (len(figures.peaks) - 1) / 2) * width for size in range(len(peaks))]
        axes.bar(places, peaks, 0.92 * width, color=_COLOURS[index], label=name, zorder=2)
        if name in figures.measured:
            size, peak = figures.measured[name]
            label = "measured" if index == 1 else None
            axes.plot(places[size], peak, "D", color="#1a1a1a", markersize=7, label=label, zorder=3)
    axes.axhline(figures.limit, color="#1a1a1a", linewidth=1.2, linestyle="--", label="what a device has", zorder=3)
    axes.set_xticks(range(len(figures.sizes)), figures.sizes)
    axes.set_xlabel("Llama-2 shapes, parameters", fontsize=9)
    axes.set_ylabel("peak of the fullest device, GB", fontsize=9)
    axes.set_title("8 A100, NVLink: what fits", loc="left", fontsize=10)
    _finish(axes)
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def _draw_slowdowns(axes: Axes, figures: Figures) -> None:
    axes.axhspan(*figures.band, color="#e3bd2b", alpha=0.45, zorder=0, label="measured over PCIe")
    for style, (name, slowdowns) in zip(_LINES, figures.slowdowns.items(), strict=True):
        axes.plot(figures.bandwidths, slowdowns, markersize=5, linewidth=1.5, label=name, **style)  # pyright: ignore[reportArgumentType]
    axes.set_xscale("log")
    axes.set_xticks(figures.bandwidths, [f"{each:g}" for each in figures.bandwidths])
    axes.minorticks_off()
    axes.set_xlabel("bandwidth between two GPUs, one way, GB/s, logarithmic", fontsize=9)
    axes.set_ylabel("step with BPipe / step of 1F1B", fontsize=9)
    axes.set_title("4 A800, Llama-2 10.4b: what the link costs", loc="left", fontsize=10)
    _finish(axes)
    axes.legend(fontsize=8, frameon=False, loc="upper right")


def _finish(axes: Axes) -> None:
    axes.grid(color="#e6e6e2", linewidth=0.6, axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(colors="#444444", length=3, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
