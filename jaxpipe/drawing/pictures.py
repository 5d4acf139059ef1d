"""The look of all pictures: colours, and the empty figure, the legend and the bytes of those that matplotlib draws.

Hue is the kind of an action, shade its replica and chunk; stored parts have colours too. The only module of jaxpipe
that loads matplotlib to draw, and only when it is called: commands that print text start without it. Figures are drawn
without a window, and the same schedule always gives the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.lowering.chunks import chunk_of_action
from jaxpipe.schedules import Kind, Schedule
from jaxpipe.schedules.schedule import COMPUTE_KINDS, HOST, PARTNER

HUES = {  # distinct in print, on dark pages and to colour-blind readers (after Okabe and Ito, 2008)
    Kind.F: "#1b6ca8",
    Kind.B: "#2a8f6a",
    Kind.I: "#c77d11",
    Kind.W: "#8e5a9e",
    Kind.EVICT: "#b5352c",
    Kind.LOAD: "#e3bd2b",
    Kind.SYNC: "#555555",
    Kind.S: "#7fb8d6",
    Kind.T: "#c9739f",
    Kind.UPDATE: "#8c6239",
}
NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.EVICT: "EVICT to partner",
    Kind.LOAD: "LOAD from partner",
    Kind.S: "head: statistics",
    Kind.T: "head: gradients",
    Kind.UPDATE: "update of the weights",
}
ARROWS = {Kind.EVICT: ">", Kind.LOAD: "<"}  # in place of names, in a grid of text with cells of three letters
STORED = {  # attributes of Stored, from below -> colour and name of what a device stores
    "own": ("#1b6ca8", "own stages"),
    "parked": ("#9ccbea", "parked for the paired device"),
    "in_transit": ("#d5602c", "in transit"),
}
# How far the shades of a kind are mixed with white, from the first chunk to the last: dark for replica 0 and, where
# there is a replica 1, light for replica 1, so that the replicas stay apart however many chunks there are.
_ONE_REPLICA = ((0.0, 0.62),)
_TWO_REPLICAS = ((0.0, 0.25), (0.55, 0.75))
_LIGHTEST = 225  # lightness of the lightest shade of any kind


@dataclass(frozen=True)
class Style:
    """The look of the actions of one kind, replica and chunk."""

    label: str
    fill: str
    ink: str
    is_thin: bool  # whether they are EVICT, LOAD or SYNC, which stand in the thin track
    actions: np.ndarray  # indices into `schedule.columns`


def styles(schedule: Schedule) -> list[Style]:
    """The styles of `schedule`, in the order of kinds, replicas and chunks; every action is in exactly one.

    Example:
        >>> from jaxpipe.schedules import build
        >>> [style.label for style in styles(build("gpipe", num_devices=2, num_microbatches=2))]
        ['forward', 'backward']
    """
    columns = schedule.columns
    placement = schedule.placement
    num_chunks = placement.num_chunks
    num_replicas = placement.num_replicas
    num_shades = num_chunks * num_replicas
    shade = chunk_of_action(schedule)
    result = []
    for kind, hue in HUES.items():
        for index in range(num_shades):
            actions = np.flatnonzero((columns.kind == kind) & (shade == index))
            if len(actions):
                replica, chunk = divmod(index, num_chunks)
                label = NAMES.get(kind, kind.name)
                label = label.replace(PARTNER, HOST) if schedule.parks_on_host else label
                label += f", replica {replica}" if num_replicas > 1 else ""
                label += f", chunk {chunk}" if num_chunks > 1 else ""
                darkest, lightest = (_ONE_REPLICA if num_replicas == 1 else _TWO_REPLICAS)[replica]
                fill = _mix_with_white(hue, darkest + (lightest - darkest) * chunk / max(num_chunks - 1, 1))
                result.append(Style(label, fill, ink(fill), kind not in COMPUTE_KINDS, actions))
    return result


def _rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _mix_with_white(colour: str, fraction: float) -> str:
    """`colour` with so much white; less in a light one, whose last shade would be as white as the page."""
    rgb = _rgb(colour)
    room = (_LIGHTEST - _lightness(rgb)) / (255 - _lightness(rgb))
    fraction *= min(1.0, room / _TWO_REPLICAS[1][1])
    return "#" + "".join(f"{round(c + (255 - c) * fraction):02x}" for c in rgb)


def ink(colour: str) -> str:
    """The colour of text that is read on `colour`, which is `#rrggbb`."""
    return "#ffffff" if _lightness(_rgb(colour)) < 150 else INK


def _lightness(rgb: Sequence[int]) -> float:
    """0 to 255, by ITU-R BT.601."""
    red, green, blue = rgb
    return 0.299 * red + 0.587 * green + 0.114 * blue


if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE_FORMATS = ("png", "svg", "pdf")
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


def encode(figure: Figure, file_format: str) -> bytes:
    """The bytes of `figure` as one of FILE_FORMATS; they contain no date and no random name."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):  # pyright: ignore[reportArgumentType]: names of settings are str
        figure.savefig(buffer, format=file_format, metadata=_NO_METADATA.get(file_format))
    return buffer.getvalue()


def heat_map(rows: np.ndarray, *, title: str, column: str, value: str) -> bytes:
    """A PNG of "layer column" numbers by colour, the first layer above; says what a column and a value are."""
    height, width = (min(max(0.2 * size, 1.5), 10.0) for size in rows.shape)
    figure = new_figure(width + 1.8, height + 0.9)
    axes = add_axes(figure, 0.6, 0.5, width, height)
    picture = axes.imshow(rows, aspect="auto", interpolation="nearest")
    axes.set(title=title, xlabel=column, ylabel="layer")
    axes.locator_params(integer=True)
    figure.colorbar(picture, cax=add_axes(figure, width + 0.8, 0.5, 0.2, height), label=value)
    return encode(figure, "png")
