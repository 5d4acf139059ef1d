"""Where does the program keep messages and residuals, and how much room does that take?

Lifetimes are counted in half rounds: an action of round r reads at 2r, and what it or a permute of round
r stores is there from 2r + 1. A page is free for the next tenant once its last reader has run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.lowering.lifetimes import allocate
from jaxpipe.schedules.action import Kind

if TYPE_CHECKING:
    from jaxpipe.lowering.table import RoundTable


@dataclass(frozen=True, eq=False)
class Storage:
    """Pages of one table; every device has the same number of them (one program, one set of buffers).

    The inbox has one page more than `num_inbox`: it takes what arrives unasked.
    """

    source: np.ndarray  # [R, D] inbox page that the action reads; num_inbox for the F of stage 0
    keep: np.ndarray  # [R, D] inbox page for an output that stays on its device; num_inbox for others
    arrival: np.ndarray  # [R, D, permute] inbox page for what each permute of the round brings
    pages: np.ndarray  # [R, D, layer] residual pages that the action writes (F) or reads (B)
    num_inbox: int
    num_pages: int  # residual pages, the most that any device needs at once
    num_slots: int  # (stage, microbatch) whose residuals live at once, the most of any device


def allocate_storage(table: RoundTable) -> Storage:
    """Pages for every message and every (stage, microbatch, layer) of `table`."""
    source, keep, arrival, num_inbox = _inbox(table)
    pages, num_pages, num_slots = _residuals(table)
    return Storage(source, keep, arrival, pages, num_inbox, num_pages, num_slots)


def _inbox(table: RoundTable) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    device, rounds = table.schedule.columns.device, table.rounds
    message = table.dependencies.message
    reader = np.flatnonzero(message >= 0)
    sender = message[reader]
    travels = device[sender] != device[reader]
    stored = rounds[sender] + travels
    page, num_inbox = _per_device(device[reader], 2 * stored + 1, 2 * rounds[reader], np.ones_like(reader))
    page = np.array([units[0] for units in page], dtype=int)

    trash = num_inbox
    read, kept = np.full(len(rounds), trash), np.full(len(rounds), trash)
    read[reader] = page
    kept[sender[~travels]] = page[~travels]

    num_devices = table.schedule.num_devices
    arrival = np.full((table.num_rounds, num_devices, max(map(len, table.permutes))), trash, np.int32)
    index = np.full((table.body_rounds, num_devices, num_devices), -1)
    for position, permutes in enumerate(table.permutes):
        for k, pairs in enumerate(permutes):
            for s, t in pairs:
                index[position, s, t] = k
    sender, reader, page, arrived = sender[travels], reader[travels], page[travels], stored[travels]
    k = index[table.position[arrived], device[sender], device[reader]]
    arrival[arrived, device[reader], k] = page
    return table.grid(read, otherwise=trash), table.grid(kept, otherwise=trash), arrival, num_inbox


def _residuals(table: RoundTable) -> tuple[np.ndarray, int, int]:
    columns, rounds = table.schedule.columns, table.rounds
    num_layers = np.array(table.layers_per_stage)
    pages = np.zeros((table.num_rounds, table.schedule.num_devices, max(table.layers_per_stage)), np.int32)
    if not table.has_backward:
        return pages, 0, 0
    last = np.flatnonzero(columns.is_kind(Kind.B, Kind.I))
    first = table.dependencies.local[last]
    device, start, end = columns.device[last], 2 * rounds[first], 2 * rounds[last]
    units, num_pages = _per_device(device, start, end, num_layers[columns.stage[last]])
    for layer in range(pages.shape[-1]):
        has = np.flatnonzero(num_layers[columns.stage[last]] > layer)
        page = [units[i][layer] for i in has.tolist()]
        pages[rounds[first[has]], device[has], layer] = page
        pages[rounds[last[has]], device[has], layer] = page
    return pages, num_pages, _most_at_once(device, start, end)


def _per_device(
    device: np.ndarray, start: np.ndarray, end: np.ndarray, sizes: np.ndarray
) -> tuple[list[list[int]], int]:
    """`allocate` on each device by itself; the number of units is the most of any device."""
    units: list[list[int]] = [[]] * len(device)
    num_units = 0
    for d in np.unique(device):
        own = np.flatnonzero(device == d)
        allocated, num = allocate(start[own], end[own], sizes[own])
        num_units = max(num_units, num)
        for i, taken in zip(own.tolist(), allocated, strict=True):
            units[i] = taken
    return units, num_units


def _most_at_once(device: np.ndarray, start: np.ndarray, end: np.ndarray) -> int:
    """The most intervals of one device that share a moment."""
    time = np.concatenate([start, end + 1])
    change = np.concatenate([np.ones_like(start), -np.ones_like(end)])
    owner = np.concatenate([device, device])
    order = np.lexsort((change, time, owner))
    return int(np.cumsum(change[order]).max(initial=0))
