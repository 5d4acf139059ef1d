"""The picture: what each stage's device holds at its peak, with and without BPipe.

Goes in: `Stages`, by accounting. Comes out: a PNG, drawn by matplotlib. Its text chunk holds the figures as JSON, so
that a file shows whether it is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages import Stages

from experiments.png import png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From below; distinct to colour-blind readers (after Okabe and Ito, 2008), and apart in lightness.
_KINDS = {
    "fixed": ("#c9c9c4", "weights, gradients, optimizer, messages, workspace"),
    "own": ("#1b6ca8", "own activations"),
    "parked": ("#9ccbea", "parked for the paired device"),
    "in_transit": ("#d5602c", "in transit"),
}


def content(panels: Mapping[str, Stages], limit_bytes: float) -> str:
    """What a picture says of itself: GiB, as drawn."""
    found = {title: _gib(each) for title, each in panels.items()}
    return json.dumps({"panels": found, "limit": round(limit_bytes / 2**30, 2)}, sort_keys=True)


def draw(panels: Mapping[str, Stages], limit_bytes: float) -> bytes:
    """The bytes of a PNG.

    Args:
        panels: title -> what is drawn there.
        limit_bytes: what a device has for a step.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 4.6), dpi=130, layout="constrained")
    every = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, found) in zip(every, panels.items(), strict=True):
        _draw(axes, title, found, limit_bytes)
    every[0].set_ylabel("GiB of a device when it holds most", fontsize=9)
    figure.legend(*every[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return png_of(figure, content=content(panels, limit_bytes))


def _gib(found: Stages) -> dict[str, list[float]]:
    """Kind -> [device] GiB, and what one program takes of every device."""
    size = len(found.own)
    values = {
        "fixed": [found.fixed] * size,
        "own": found.own,
        "parked": found.parked,
        "in_transit": found.in_transit,
        "one_program": [found.one_program],
    }
    return {kind: [round(float(each) / 2**30, 2) for each in every] for kind, every in values.items()}


def _draw(axes: Axes, title: str, found: Stages, limit_bytes: float) -> None:
    gib, floor = _gib(found), [0.0] * len(found.own)
    for kind, (colour, name) in _KINDS.items():
        axes.bar(range(len(floor)), gib[kind], bottom=floor, color=colour, width=0.8, label=name, zorder=2)
        floor = [low + high for low, high in zip(floor, gib[kind], strict=True)]
    axes.axhline(
        limit_bytes / 2**30, color="#1a1a1a", linewidth=1.3, linestyle="--", label="what a device has", zorder=3
    )
    axes.axhline(
        gib["one_program"][0], color="#b5352c", linewidth=1.3, linestyle=":", label="jaxpipe's one program", zorder=3
    )
    axes.set_ylim(0, 1.12 * limit_bytes / 2**30)
    axes.set_xticks(range(len(floor)))
    axes.set_xlabel("device of the pipeline", fontsize=9)
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(color="#e6e6e2", linewidth=0.6, axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(colors="#444444", length=3, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
