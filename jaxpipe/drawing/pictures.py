"""The common parts of the timeline and the memory chart: an empty figure, its legend, its bytes as PNG, SVG or PDF.

The only module of jaxpipe that loads matplotlib to draw, and only when it is called: commands that print text start
without it. Figures are drawn without a window, and the same schedule always gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMS = ("png", "svg", "pdf")
INK = "#1a1a1a"
_DPI = 160
# Text stays text in an SVG. One family, because matplotlib writes all of them beside each label.
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "jaxpipe", "font.sans-serif": ["DejaVu Sans"]}
_NO_METADATA = {"svg": dict.fromkeys(("Creator", "Date", "Format", "Type")), "pdf": {"CreationDate": None}}
_LEGEND = {"loc": "lower left", "fontsize": 8, "frameon": False, "borderaxespad": 0}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; lengths in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI)


def add_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Adds axes without a frame to `figure`; lengths in inches."""
    total_width, total_height = figure.get_size_inches().tolist()
    axes = figure.add_axes((left / total_width, bottom / total_height, width / total_width, height / total_height))
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def add_legend(
    figure: Figure, handles: Sequence[Artist], left: float, bottom: float, *, num_columns: int, handle_length: float
) -> None:
    """Adds the legend; `left` and `bottom` place its lower left corner, in inches."""
    width, height = figure.get_size_inches().tolist()
    place = (left / width, bottom / height)
    figure.legend(handles=handles, bbox_to_anchor=place, ncols=num_columns, handlelength=handle_length, **_LEGEND)


def encode(figure: Figure, form: str) -> bytes:
    """The bytes of `figure` as one of FORMS; they contain no date and no random name."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):  # pyright: ignore[reportArgumentType]: names of settings are str
        figure.savefig(buffer, format=form, metadata=_NO_METADATA.get(form))
    return buffer.getvalue()
