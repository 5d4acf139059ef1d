"""Pictures of pages that say what they show: a PNG whose text chunk holds its figures.

Goes in: a figure of matplotlib and a text, such as JSON. Comes out: a PNG; and of a PNG its text, by which a test sees
whether the picture is up to date.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEY = "Comment"  # of the text chunk


def png_of(figure: Figure, *, content: str) -> bytes:
    """The bytes of a PNG that has `content` in its text chunk, and no version of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={_KEY: content, "Software": None})
    return buffer.getvalue()


def content_of(path: Path) -> str:
    """What the picture at `path` says of itself."""
    from PIL import Image

    with Image.open(path) as image:
        return str(image.info[_KEY])
