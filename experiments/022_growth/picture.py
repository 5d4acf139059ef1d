"""The picture of what grows and what does not: seconds and sizes over devices and over microbatches."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = dict[str, Any]
_COLOURS = {  # distinct to colour-blind readers (after Okabe and Ito, 2008)
    "1f1b": ("#1b6ca8", "o"),
    "bpipe": ("#d5602c", "s"),
    "bitpipe": ("#2a8f6a", "^"),
    "zb_h1": ("#8e5a9e", "D"),
    "v_half": ("#c77d11", "v"),
}


def draw(records: dict[str, list[Record]]) -> bytes:
    """The bytes of a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    lowering, compiling, planning = figure.subplots(1, 3)
    for name, (colour, marker) in _COLOURS.items():
        of_name = [record for record in records["schedules"] if record["schedule"] == name]
        points = sorted((record["actions"], record["lower_s"]) for record in of_name)
        lowering.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=1, label=name)
    _name(lowering, "actions of the step", "seconds", "Lowering: with the actions, D x N")
    lowering.legend(frameon=False, fontsize=8)
    _series(compiling, records["programs"], "N", "compile_s", "1f1b", "N to 4096, D=8, on CPUs", {"D": 8})
    _series(compiling, records["gpus"], "D", "command_s", "bpipe", "D to 256, N=2D, for absent A100s", {}, twice=True)
    _name(compiling, "N or D", "seconds", "Compiling: flat")
    compiling.set_ylim(0.5)
    compiling.legend(frameon=False, fontsize=8)
    _series(planning, records["plans"], "GPUs", "command_s", "bitpipe", "jaxpipe.plan", {})
    _name(planning, "GPUs", "seconds", "Planning GPT-3 175B")
    sizes = [record["GPUs"] for record in records["plans"]]
    planning.set_xticks(sizes, map(str, sizes))
    planning.minorticks_off()
    planning.set_yticks((1, 10, 100), ("1", "10", "100"))
    planning.legend(frameon=False, fontsize=8)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _series(
    axes: Axes,
    records: Sequence[Record],
    x: str,
    y: str,
    colour_of: str,
    label: str,
    where: dict[str, int],
    *,
    twice: bool = False,
) -> None:
    """One line of the records that have what `where` says, and N=2D if `twice`."""
    chosen = [
        (record[x], record[y])
        for record in records
        if all(record[name] == value for name, value in where.items()) and (not twice or record["N"] == 2 * record["D"])
    ]
    colour, marker = _COLOURS[colour_of]
    axes.plot(*zip(*sorted(chosen), strict=True), color=colour, marker=marker, markersize=4, linewidth=1, label=label)


def _name(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(f"{y} of one core")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(visible=True, color="#eeeeee")
    for spine in ("top", "right"):
        axes.spines[spine].set_visible(False)
