"""Labels beside the points of a picture, so that none covers a point, a line or another label.

Goes in: matplotlib's axes with what is drawn, points and their texts. Comes out: texts on the axes, with a thin line to
the point where one stands farther away.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox

_DISTANCES = (7.0, 15.0, 24.0, 34.0, 46.0, 60.0, 76.0, 94.0)  # from the point, in pixels of 1/72 inch
_ANGLES = (0, 180, 25, -25, 155, -155, 50, -50, 130, -130, 75, -75, 105, -105)  # degrees; right is best, then left
_POINT = 4.5  # half the width of a mark, likewise
_CURVE = 2.0  # of a line
_LINE = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "shrinkA": 0.0, "shrinkB": 3.0}
_NEAR = 10.0  # no line to a label within this distance


def label(axes: Axes, points: np.ndarray, texts: Sequence[str], *, lines: np.ndarray, font_size: float) -> None:
    """Writes `texts` beside `points`.

    Args:
        axes: with scales and limits as they stay.
        points: [P, 2] in data coordinates; a label has room in the order in which they come.
        texts: [P]
        lines: [L, 2] places on lines that no label may cover, close together, in data coordinates.
        font_size: in points.
    """
    from matplotlib.text import Text

    renderer = axes.figure.canvas.get_renderer()  # pyright: ignore[reportAttributeAccessIssue]
    pixel = axes.figure.dpi / 72  # pyright: ignore[reportOptionalMemberAccess]
    frame = axes.get_window_extent(renderer)
    places = axes.transData.transform(np.concatenate([points, lines]))
    margins = pixel * np.repeat([_POINT, _CURVE], [len(points), len(lines)])
    taken: list[Bbox] = []
    for point, text in zip(points, texts, strict=True):
        for distance, angle in product(_DISTANCES, _ANGLES):
            x, y = distance * np.cos(np.radians(angle)), distance * np.sin(np.radians(angle))
            drawn = axes.annotate(
                text,
                tuple(point),
                xytext=(x, y),
                textcoords="offset points",
                ha="left" if abs(angle) < 90 else "right",
                va="center",
                fontsize=font_size,
                color="#1a1a1a",
                linespacing=1.05,
                arrowprops=_LINE if distance > _NEAR else None,
            )
            drawn.update_positions(renderer)
            box = Text.get_window_extent(drawn, renderer).padded(pixel)  # without the line
            if _is_free(box, frame, taken, places, margins):
                taken.append(box)
                break
            drawn.remove()
        else:
            raise ValueError(f"no room for the label {text!r}: draw on a larger page")


def _is_free(box: Bbox, frame: Bbox, taken: Sequence[Bbox], places: np.ndarray, margins: np.ndarray) -> bool:
    """Whether `box` lies in `frame` and covers neither another one nor a place with its margin, all in pixels."""
    inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
    x, y = places.T
    covers = (box.x0 - margins < x) & (x < box.x1 + margins) & (box.y0 - margins < y) & (y < box.y1 + margins)
    return inside and not covers.any() and not any(box.overlaps(other) for other in taken)
