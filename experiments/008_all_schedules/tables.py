"""The tables that need no compiling: bubbles, the two clocks, activations, and what a step sends.

Goes in: `formulas.ROWS`. Comes out: Markdown, formula beside simulated beside as the program has it. The round table is
the very one that the program executes. Bytes of a message, a page and a layer come from `compiled`, as does the table
of bytes that XLA allocates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from formulas import ROWS, Row, written

from experiments.pages import markdown
from jaxpipe.drawing import Summary
from jaxpipe.schedules import Costs, Formula, build, peak_activations

NUM_DEVICES, NUMS_MICROBATCHES = 8, (8, 32)
NUM_LAYERS = 32  # of the model, on all devices together
COSTS = {
    "b=f": Costs(backward=1.0, input_gradient=0.5, weight_gradient=0.5),
    "b=2f": Costs(),
    "b=3f": Costs(backward=3.0, input_gradient=1.5, weight_gradient=1.5),
    "b=2f, message 0.1f": Costs(transfer=0.1, slot_messages=0.0, gradient_messages=0.0),
}


@dataclass(frozen=True)
class UnitBytes:
    """Bytes on one device of what travels.

    Attributes:
        message: activations of one microbatch between two stages.
        page: residuals of one layer of one microbatch.
        layer: its weights, or their gradients; both are float32.
    """

    message: int
    page: int
    layer: int


@cache
def figures(row: Row, num_microbatches: int, costs: str = "b=2f") -> Summary:
    """The figures of one schedule under one of `COSTS`; its stages share `NUM_LAYERS`."""
    schedule = build(row.name, num_devices=NUM_DEVICES, num_microbatches=num_microbatches, **row.given)
    return Summary(schedule, COSTS[costs], NUM_LAYERS // schedule.num_stages)


def time_table() -> str:
    """Bubble ratios: formulas, then on the asynchronous and on the SPMD clock."""
    rows = []
    for row in ROWS:
        cells = [row.label, _texts(row.bubble)]
        for num_microbatches in NUMS_MICROBATCHES:
            found = figures(row, num_microbatches)
            work = (1 - found.timeline.bubble_ratio) * found.timeline.makespan
            spmd = 1 - work / found.spmd["makespan"]
            cells += [
                _values(row, row.bubble, num_microbatches, ".4f"),
                f"{found.timeline.bubble_ratio:.4f}",
                f"{spmd:.4f}",
            ]
        rows.append(cells)
    return markdown(["schedule", "bubble ratio", *_heads("formula", "asynchronous", "SPMD")], rows)


def clock_table() -> str:
    """Makespan of the program, laid out for the costs, over that of devices that need not keep step."""
    rows = []
    for row in ROWS:
        found = [figures(row, n, costs) for n in NUMS_MICROBATCHES for costs in COSTS]
        rows.append([row.label, *(f"{each.spmd['makespan'] / each.timeline.makespan:.3f}" for each in found)])
    return markdown(["schedule", *_heads(*COSTS)], rows)


def memory_table() -> str:
    """Copies of the weights and activations in Ma: formulas, least and most of any device, and the program's slots."""
    rows = []
    for row in ROWS:
        replicas = figures(row, NUM_DEVICES).schedule.num_replicas
        cells = [row.label, f"{replicas}", _texts(row.activations)]
        for num_microbatches in NUMS_MICROBATCHES:
            found = figures(row, num_microbatches)
            peak = peak_activations(found.schedule)
            slots = found.table.num_slots / found.schedule.placement.num_chunks
            cells += [
                _values(row, row.activations, num_microbatches, "g"),
                _range((float(peak.min()), float(peak.max())), "g"),
                f"{slots:g}",
            ]
        rows.append(cells)
    return markdown(
        ["schedule", "weights, M_theta", "activations, Ma", *_heads("formula", "simulated", "compiled")], rows
    )


def traffic_table(size: UnitBytes) -> str:
    """Messages of a device, asked for / sent, permutes of the step, and bytes of a device, asked for / sent."""
    rows = []
    for row in ROWS:
        cells = [row.label, _texts(row.messages)]
        for num_microbatches in NUMS_MICROBATCHES:
            found = figures(row, num_microbatches)
            asked, sent = found.table.asked_messages.max(), found.table.sent_messages.max()
            asked_mb, sent_mb = (each(found, size).max() / 1e6 for each in (asked_bytes, sent_bytes))
            cells += [
                _values(row, row.messages, num_microbatches, "g"),
                f"{asked} / {sent}",
                f"{found.spmd['permutes_per_step']}",
                f"{asked_mb:.1f} / {sent_mb:.1f}",
            ]
        rows.append(cells)
    heads = _heads("formula", "messages", "permutes", "MB")
    return markdown(["schedule", "messages", *heads], rows)


def asked_bytes(found: Summary, size: UnitBytes) -> np.ndarray:
    """[device] bytes that the schedule has it send: messages, pages, and gradients of replica 1's stages."""
    gradients = np.array(found.gradients["asked"]) / 2  # of two holders, one sends
    return _bytes(found, size, found.table.asked_messages, "asked", gradients)


def sent_bytes(found: Summary, size: UnitBytes) -> np.ndarray:
    """[device] bytes that the program has it send: those of its permutes, and weights for the partner's replica 1."""
    placement = found.schedule.placement
    returned = placement.num_chunks * (placement.num_replicas - 1)  # stages whose compute weights go to the partner
    return _bytes(found, size, found.table.sent_messages, "sent", np.array(found.gradients["sent"]) + returned)


def _bytes(found: Summary, size: UnitBytes, messages: np.ndarray, which: str, stages: np.ndarray) -> np.ndarray:
    loaded_for_partner = np.array(found.transfers["loaded"][which])[::-1]
    slots = np.array(found.transfers["evicted"][which]) + loaded_for_partner
    return messages * size.message + found.num_layers * (slots * size.page + stages * size.layer)


def _heads(*heads: str) -> list[str]:
    return [f"N={num_microbatches}: {head}" for num_microbatches in NUMS_MICROBATCHES for head in heads]


def _texts(formulas: Sequence[Formula]) -> str:
    return "; ".join(map(written, formulas)) or "-"


def _values(row: Row, formulas: Sequence[Formula], num_microbatches: int, form: str) -> str:
    """What the formulas say, ours in italics; the same value once."""
    cells: dict[str, str] = {}
    for formula in formulas:
        values = row.values(formula, NUM_DEVICES, num_microbatches)
        if values:
            cell = _range(values, form)
            cells.setdefault(cell, cell if formula.source else f"*{cell}*")
    return "; ".join(cells.values()) or "-"


def _range(values: Sequence[float | None], form: str) -> str:
    """One value, the least and the most, or what is known of them."""
    cells = ["" if value is None else f"{value:{form}}" for value in dict.fromkeys(values)]
    return "..".join(cells)
