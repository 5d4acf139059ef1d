"""Where does the program keep messages and residuals, and how much room does that take?

At the end of a round, what has arrived and what the action produced is either passed straight to the
action of the next round or stored in an inbox page until the round before its reader's. Residual pages are
taken by an F and free again after its B. All pages are given out by lifetime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.lowering.lifetimes import allocate
from jaxpipe.schedules.action import Kind

if TYPE_CHECKING:
    from jaxpipe.lowering.table import RoundTable

# Where the next action's message comes from, if not from an inbox page (>= 0).
NOTHING = -1  # the F of stage 0, and idle rounds
OWN = -2  # what the action of this round produced
FIRST_PERMUTE = -3  # what this round's permute k brought is FIRST_PERMUTE - k


@dataclass(frozen=True, eq=False)
class Storage:
    """Pages of one table; every device has the same number of them (one program, one set of buffers)."""

    next_source: np.ndarray  # [R, D] where the message of the next round's action comes from
    keep: np.ndarray  # [R, D] inbox page for the action's own output; num_inbox where it is not stored
    arrival: np.ndarray  # [R, D, permute] inbox page for what each permute brings; num_inbox where not stored
    pages: np.ndarray  # [R, D, layer] residual pages that the action writes (F) or reads (B)
    num_inbox: int  # one page more takes what nobody stores
    num_pages: int  # residual pages, the most that any device needs at once
    num_slots: int  # (stage, microbatch) whose residuals live at once, the most of any device


def allocate_storage(table: RoundTable) -> Storage:
    """Pages for every message and every (stage, microbatch, layer) of `table`."""
    next_source, keep, arrival, num_inbox = _messages(table)
    pages, num_pages, num_slots = _residuals(table)
    return Storage(next_source, keep, arrival, pages, num_inbox, num_pages, num_slots)


def _messages(table: RoundTable) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    device, rounds, message = table.schedule.columns.device, table.rounds, table.dependencies.message
    reader = np.flatnonzero(message >= 0)
    sender = message[reader]
    permute = _permute_index(table, sender, reader)  # -1 for a message that stays on its device
    there = rounds[sender] + (permute >= 0)  # the round at whose end the message is there
    passed_on = rounds[reader] - 1  # the round at whose end it goes to its reader
    source = np.where(permute >= 0, FIRST_PERMUTE - permute, OWN)

    waits = np.flatnonzero(there < passed_on)
    units, num_inbox = _per_device(device[reader[waits]], there[waits], passed_on[waits], np.ones_like(waits))
    page = np.full(len(reader), num_inbox)
    page[waits] = [taken[0] for taken in units]
    source[waits] = page[waits]

    shape = (table.num_rounds, table.schedule.num_devices)
    next_source = np.full(shape, NOTHING, np.int32)
    next_source[passed_on, device[reader]] = source
    keep = np.full(shape, num_inbox, np.int32)
    stays = permute < 0
    keep[there[stays], device[reader[stays]]] = page[stays]
    arrival = np.full((*shape, max(map(len, table.permutes))), num_inbox, np.int32)
    arrival[there[~stays], device[reader[~stays]], permute[~stays]] = page[~stays]
    return next_source, keep, arrival, num_inbox


def _permute_index(table: RoundTable, sender: np.ndarray, reader: np.ndarray) -> np.ndarray:
    """[M] which permute of its round carries each message; -1 where sender and reader are one device."""
    device, num_devices = table.schedule.columns.device, table.schedule.num_devices
    index = np.full((table.body_rounds, num_devices, num_devices), -1)
    for position, permutes in enumerate(table.permutes):
        for k, pairs in enumerate(permutes):
            index[position, *np.array(pairs).T] = k
    source, target = device[sender], device[reader]
    travels = np.where(source == target, table.rounds[sender], table.rounds[sender] + 1)
    return np.where(source == target, -1, index[table.position[travels], source, target])


def _residuals(table: RoundTable) -> tuple[np.ndarray, int, int]:
    columns, rounds = table.schedule.columns, table.rounds
    num_layers = np.array(table.layers_per_stage)
    pages = np.zeros((table.num_rounds, table.schedule.num_devices, max(table.layers_per_stage)), np.int32)
    if not table.has_backward:
        return pages, 0, 0
    last = np.flatnonzero(columns.is_kind(Kind.B, Kind.I))
    first = table.dependencies.local[last]
    device, start, end = columns.device[last], rounds[first], rounds[last]
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
