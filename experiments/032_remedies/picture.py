"""The picture: for each model and microbatch size each remedy's step over the best one, and what does not fit.

Goes in: steps. Comes out: a PNG, drawn by matplotlib. Its text chunk holds the steps as JSON, so that a file shows
whether it is up to date.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from experiments.png import png_of

MOST = 1.3  # slower than the best by this much and more: one colour


@dataclass(frozen=True)
class Panel:
    """One model: [microbatch size, remedy] seconds of a step; None where it does not fit."""

    title: str
    steps: Sequence[Sequence[float | None]]


def content(panels: Sequence[Panel]) -> str:
    """What a picture of `panels` says of itself."""
    return json.dumps([asdict(panel) for panel in panels], sort_keys=True)


def draw(panels: Sequence[Panel], sizes: Sequence[int], names: Sequence[str]) -> bytes:
    """The bytes of a PNG: a map for each model, one row a microbatch size, one column a remedy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 1.3 * len(panels) + 1.2), dpi=130, layout="constrained")
    every = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axes, panel in zip(every, panels, strict=True):
        steps = np.array(panel.steps, dtype=float)  # None becomes nan, which is drawn as the background
        best = np.nanmin(steps)
        shown = axes.imshow(steps / best, cmap="viridis_r", vmin=1.0, vmax=MOST, aspect="auto")
        axes.set_facecolor("#eeeeea")
        for (row, column), step_s in np.ndenumerate(steps):
            of_row = np.nanmin(steps[row]) if np.isfinite(steps[row]).any() else np.nan
            text = "does not fit" if np.isnan(step_s) else f"{step_s / best:.2f}"
            dark = step_s / best > 1.15
            axes.text(
                column,
                row,
                text,
                ha="center",
                va="center",
                fontsize=7.5 if np.isnan(step_s) else 8.5,
                color="#777777" if np.isnan(step_s) else "white" if dark else "black",
                fontweight="bold" if step_s == of_row else "normal",
            )
        axes.set_yticks(range(len(sizes)), [f"b = {size}" for size in sizes], fontsize=8)
        axes.set_title(panel.title, loc="left", fontsize=9)
        axes.tick_params(length=0)
        axes.set_xticks(range(len(names)), names if axes is every[-1] else [""] * len(names), fontsize=8.5)
    figure.colorbar(shown, ax=list(every), shrink=0.4, label="step / fastest of the model that fits", extend="max")
    return png_of(figure, content=content(panels))
