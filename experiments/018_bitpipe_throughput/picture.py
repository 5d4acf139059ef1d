"""The picture: predicted against published samples/s of Table 7, and BitPipe's speed-ups of figures 9 and 10."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from comparison import Pair
from published import METHODS, TABLE_7

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind tell apart, and a mark each.
_MARKS = (("#000000", "o"), ("#d55e00", "s"), ("#0072b2", "D"), ("#009e73", "^"), ("#cc79a7", "v"))
_STYLES = dict(zip((*METHODS, "Chimera"), _MARKS, strict=True))
_DPI = 130


def draw(rates: Mapping[tuple[str, int], Mapping[str, float]], figures: Mapping[str, Sequence[Pair]]) -> bytes:
    """A PNG.

    Args:
        rates: (model, D) -> method -> predicted samples/s of Table 7.
        figures: name -> BitPipe's speed-ups.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for (model, pipe), row in TABLE_7.items():
        for method, published in row.items():
            _mark(left, published, rates[model, pipe][method], method, filled=model.startswith("BERT"))
    _axes(left, "Table 7: 32 GPUs; filled: BERT-64, open: GPT-96", "samples/s", (16.0, 160.0), "log")
    for name, pairs in figures.items():
        for pair in pairs:
            _mark(right, pair.published, pair.predicted, pair.second, filled=name == "Figure 9")
    _axes(right, "BitPipe's speed-up; filled: Figure 9, open: Figure 10", "times as fast", (1.0, 1.4), "linear")
    handles = [left.plot([], [], mark, color=colour, label=name)[0] for name, (colour, mark) in _STYLES.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()


def _mark(axes: Axes, x: float, y: float, method: str, *, filled: bool) -> None:
    colour, mark = _STYLES[method]
    axes.plot(x, y, mark, color=colour, markerfacecolor=colour if filled else "none", markersize=7)


def _axes(axes: Axes, title: str, unit: str, limits: tuple[float, float], scale: str) -> None:
    axes.set_xscale(scale)
    axes.set_yscale(scale)
    axes.plot(limits, limits, color="#888888", linewidth=1.0, zorder=0)
    axes.set_xlim(*limits)
    axes.set_ylim(*limits)
    if scale == "log":
        ticks = (20, 30, 50, 70, 100, 150)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_yticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(f"published, {unit}{', logarithmic' if scale == 'log' else ''}")
    axes.set_ylabel(f"predicted, {unit}{', logarithmic' if scale == 'log' else ''}")
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_aspect("equal")
    axes.grid(color="#e6e6e2", linewidth=0.6)
    axes.set_axisbelow(True)
