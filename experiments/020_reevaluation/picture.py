"""The picture: MFU by microbatch size for each attention kernel, and where BPipe is needed to fit it.

Goes in: lines. Comes out: a PNG, drawn by matplotlib. Its text chunk holds the lines as JSON, so that a file shows
whether it is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.png import png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Distinct to colour-blind readers (after Okabe and Ito, 2008), and by line.
_STYLES: tuple[dict[str, object], ...] = (
    {"color": "#b5352c", "linestyle": "-"},
    {"color": "#c77d11", "linestyle": ":"},
    {"color": "#1b6ca8", "linestyle": "--"},
)
# What fits, by index: 0 1F1B, 1 BPipe alone, 2 neither.
_MARKS = (("o", "full"), ("D", "none"), ("x", "full"))
_NAMES = ("fits without BPipe", "fits with BPipe alone", "fits in neither way")

# Title of a panel -> kernel -> (microbatch size, MFU, index of what fits), by rising microbatch size.
Panels = Mapping[str, Mapping[str, Sequence[tuple[int, float, int]]]]


def content(panels: Panels) -> str:
    """What a picture of `panels` says of itself."""
    return json.dumps(panels, sort_keys=True)


def draw(panels: Panels) -> bytes:
    """The bytes of a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10.0, 4.6), dpi=130, layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, lines) in zip(every, panels.items(), strict=True):
        _draw(axes, title, lines)
    every[0].set_ylabel("MFU of a step, predicted, %", fontsize=9)
    handles = every[0].get_legend_handles_labels()[0]
    handles += [
        Line2D([], [], color="#444444", linestyle="", marker=mark, fillstyle=fill, label=name)  # pyright: ignore[reportArgumentType]
        for (mark, fill), name in zip(_MARKS, _NAMES, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return png_of(figure, content=content(panels))


def _draw(axes: Axes, title: str, lines: Mapping[str, Sequence[tuple[int, float, int]]]) -> None:
    sizes = [size for size, *_ in next(iter(lines.values()))]
    for style, (name, points) in zip(_STYLES, lines.items(), strict=True):
        values = [100 * mfu for _, mfu, _ in points]
        axes.plot(sizes, values, linewidth=1.6, label=name, **style)  # pyright: ignore[reportArgumentType]
        for size, mfu, index in points:
            mark, fill = _MARKS[index]
            axes.plot(size, 100 * mfu, mark, color=style["color"], fillstyle=fill, markersize=8, markeredgewidth=1.6)  # pyright: ignore[reportArgumentType]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("sequences of a microbatch, logarithmic", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="#e6e6e2", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(colors="#444444", length=3, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
