"""The text of the HTML page: its head, its data packed, and the scripts that draw it in the browser.

Goes in: panels, and numbers as text. Comes out: a page that needs no other file and no network. The scripts in
`assets/` decide how it looks and moves.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import NamedTuple

import numpy as np

from jaxpipe.drawing.html.panels import Panel
from jaxpipe.drawing.pictures import HUES, NAMES, STORED, ink, styles
from jaxpipe.lowering.chunks import chunk_of_action
from jaxpipe.schedules import Kind
from jaxpipe.schedules.analysis.bubbles import ROUNDING, Bubbles, bubbles
from jaxpipe.units import GIB

_SCRIPTS = ("view", "paint", "overlay", "panel", "controls", "main")
# How a device waits: attribute of Bubbles, which is the class in page.css too, -> words of its key.
_WAITS = {
    "warm_up": "waits for its first action",
    "internal": "waits in between",
    "cool_down": "is done, others are not",
}
# The colours differ from the memory chart's: here memory stands below actions, and forwards have that colour.
_STORED_FILLS = {"own": "#66758c"}
_LABELLED = 0.03  # fraction of the longest makespan from which a part of a bar is wide enough for its number


@dataclass(frozen=True, eq=False)
class Entry:
    """One schedule of the page."""

    # The schedule on each clock, in the same order for all schedules of a page; the first clock's times say where time
    # goes.
    panels: Sequence[Panel]
    summary: Mapping[str, str]  # the numbers as text, by name; the same names for all schedules of a page
    bound: float | None = None  # slots that a device may store; drawn as a line
    slot_bytes: float | None = None  # bytes of a slot; if given, the page shows GiB beside Ma


def page_text(entries: Sequence[Entry], *, note: str = "") -> str:
    """The text of the page.

    Args:
        entries: at least one schedule; all share the axis of time.
        note: a sentence below the numbers.
    """
    names = [entry.panels[0].timeline.schedule.name for entry in entries]
    values = {
        "#TITLE#": escape(", ".join(names)),
        "#STYLE#": _asset("page.css"),
        "#SUMMARY#": _summary_table(entries),
        "#NOTE#": escape(note),
        "#BARS#": _bars(entries),
        "#WAITS#": "\n".join(f'<span><i class="{name}"></i>{words}</span>' for name, words in _WAITS.items()),
        "#DATA#": _packed(entries),
        "#SCRIPT#": "\n".join(_asset(f"{name}.js") for name in _SCRIPTS),
    }
    return re.sub("|".join(values), lambda mark: values[mark[0]], _asset("page.html"))  # not in what is put in


def _asset(name: str) -> str:
    return files("jaxpipe.drawing.html").joinpath("assets", name).read_text(encoding="utf-8")


def _summary_table(entries: Sequence[Entry]) -> str:
    """Rows of the table of numbers: one for each schedule, a column for each number."""
    names = list(entries[0].summary)
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = [f'<tr><th scope="col">schedule</th>{head}</tr>']
    for entry in entries:
        name = escape(entry.panels[0].timeline.schedule.name)
        cells = "".join(f'<td data-summary="{escape(key)}">{escape(entry.summary[key])}</td>' for key in names)
        lines.append(f'<tr data-schedule="{name}"><th scope="row">{name}</th>{cells}</tr>')
    return "\n".join(lines)


def _bars(entries: Sequence[Entry]) -> str:
    """A bar for each schedule with the mean breakdown of a device's time; all bars share one scale."""
    timelines = [entry.panels[0].timeline for entry in entries]
    longest = max(timeline.makespan for timeline in timelines) or 1.0
    lines = []
    for timeline in timelines:
        parts = "".join(
            f'<span style="width:{100 * part.time / longest:.3f}%{part.colours}"{part.attributes} '
            f'title="{escape(part.words)}: {part.time:.6g}" data-part="{part.name}" data-value="{part.time:.9g}">'
            f"{f'{part.time:.4g}' if part.time > _LABELLED * longest else ''}</span>"
            for part in _parts(bubbles(timeline))
            if part.time > 0
        )
        name = escape(timeline.schedule.name)
        lines.append(f'<div class="bar-row"><b>{name}</b><div class="bar" data-schedule="{name}">{parts}</div></div>')
    return "\n".join(lines)


class _Part(NamedTuple):
    """A part of the time of a device, mean over devices; colours are those of the style sheet's class, or given."""

    name: str
    words: str
    time: float
    attributes: str = ""
    colours: str = ""


def _parts(spent: Bubbles) -> list[_Part]:
    """The parts of a device's time, in the order of a bar."""
    work = [
        _Part(kind.name, NAMES[kind], float(times.mean()), colours=f";background:{HUES[kind]};color:{ink(HUES[kind])}")
        for kind, times in spent.work.items()
    ]
    # The wait before the first action stands left of the work, as it does in time.
    first, *later = (
        _Part(name, f"a device {words}", float(getattr(spent, name).mean()), attributes=f' class="{name}"')
        for name, words in _WAITS.items()
    )
    return [first, *work, *later]


class _Arrays:
    """Arrays of 4-byte values in one block; each is named by its type, place and length."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.size = 0

    def add(self, values: np.ndarray, dtype: str = "int32") -> list[object]:
        """Appends `values` as "int32" or "float32"; returns their name."""
        name: list[object] = [dtype, self.size, values.size]
        # Little-endian on every machine, as browsers read typed arrays on all hardware that they run on.
        self.pieces.append(values.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        self.size += values.size
        return name


def _packed(entries: Sequence[Entry]) -> str:
    """The data of the drawing: a line of JSON, then the block of its arrays, compressed, as base64."""
    arrays = _Arrays()
    panels = [
        {
            **_panel_values(panel, entry, index),
            **_action_values(panel, arrays),
            **_round_values(panel, arrays),
            **_stored_values(panel, arrays),
        }
        for index, entry in enumerate(entries)
        for panel in entry.panels
    ]
    stored = [
        {"part": part, "fill": _STORED_FILLS.get(part, fill), "label": label} for part, (fill, label) in STORED.items()
    ]
    head = json.dumps({"panels": panels, "stored": stored, "kinds": [kind.name for kind in Kind]})
    data = zlib.compress(b"".join(arrays.pieces))
    # A name of a schedule may contain `</script>`, which would end the block of data.
    return head.replace("<", r"\u003c") + "\n" + base64.b64encode(data).decode()


def _panel_values(panel: Panel, entry: Entry, index: int) -> dict[str, object]:
    """The scalar values of a panel, numbers and words; `index` is the place of its schedule on the page."""
    schedule = panel.timeline.schedule
    timeline = panel.timeline
    num_chunks = schedule.placement.num_chunks  # slots of a Ma
    return {
        "schedule": schedule.name,
        "index": index,
        "clock": panel.clock,
        "numDevices": schedule.num_devices,
        "numReplicas": schedule.num_replicas,
        "parksOnHost": schedule.parks_on_host,
        "numChunks": num_chunks,
        "makespan": timeline.makespan,
        "bubbleRatio": timeline.bubble_ratio,
        "bound": None if entry.bound is None else entry.bound / num_chunks,
        "gibPerMa": None if entry.slot_bytes is None else entry.slot_bytes * num_chunks / GIB,
    }


def _action_values(panel: Panel, arrays: _Arrays) -> dict[str, object]:
    """The arrays of actions and transfers, and their styles."""
    schedule = panel.timeline.schedule
    columns = schedule.columns
    timeline = panel.timeline
    looks = styles(schedule)
    style = np.zeros(len(columns.kind), dtype=int)
    for i, look in enumerate(looks):
        style[look.actions] = i
    return {
        "styles": [{"label": look.label, "fill": look.fill, "ink": look.ink, "isThin": look.is_thin} for look in looks],
        "first": arrays.add(columns.first),
        "kind": arrays.add(columns.kind),
        "stage": arrays.add(columns.stage),
        "microbatch": arrays.add(columns.microbatch),
        "replica": arrays.add(columns.replica),
        "chunk": arrays.add(chunk_of_action(schedule)),
        "start": arrays.add(timeline.start, "float32"),
        "end": arrays.add(timeline.end, "float32"),
        "message": arrays.add(panel.message),
        "criticalPredecessor": arrays.add(panel.critical_predecessor),
        "style": arrays.add(style),
    }


def _round_values(panel: Panel, arrays: _Arrays) -> dict[str, object]:
    """The arrays of rounds; empty on a clock that has none."""
    if panel.rounds is None or panel.round_start is None:
        return {}
    return {
        "round": arrays.add(panel.rounds),
        # Times are drawn, not compared: 32 bits are enough.
        "roundStart": arrays.add(panel.round_start.ravel(), "float32"),
        "numRounds": len(panel.round_start),
    }


def _stored_values(panel: Panel, arrays: _Arrays) -> dict[str, object]:
    """The arrays of stored activations, in Ma, device by device."""
    lasting = [stored.lasting(panel.timeline.makespan * ROUNDING) for stored in panel.stored]
    ma_per_slot = 1 / panel.timeline.schedule.placement.num_chunks

    def every(name: str) -> np.ndarray:
        return np.concatenate([getattr(stored, name) for stored in lasting])

    return {
        "storedFirst": arrays.add(np.cumsum([0, *(len(stored.time) for stored in lasting)])),
        "storedTime": arrays.add(every("time"), "float32"),
        **{f"stored_{part}": arrays.add(every(part) * ma_per_slot, "float32") for part in STORED},
    }
