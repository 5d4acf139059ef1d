"""Where does the program keep messages, and how much room does that take?

At the end of a round, what has arrived and what the action produced is either passed straight to the next
action of the device or, if others come before its reader, stored in an inbox page until the last of them is done. A
device that idles keeps what was passed to it. Inbox pages are given out by lifetime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.lowering.lifetimes import allocate_per_device

if TYPE_CHECKING:
    from jaxpipe.lowering.table import RoundTable

# Where the next action's message comes from, if not from an inbox page (>= 0).
NOTHING = -1  # the F of stage 0, and idle rounds
OWN = -2  # what the action of this round produced; in an idle round, what it was passed before
FIRST_PERMUTE = -3  # what this round's permute k brought is FIRST_PERMUTE - k


@dataclass(frozen=True, eq=False)
class Inbox:
    """Messages of one table; every device has the same number of inbox pages (one program, one set of buffers)."""

    next_source: np.ndarray  # [R, D] where the message of the next action comes from
    keep: np.ndarray  # [R, D] inbox page for the action's own output; num_inbox where it is not stored
    arrival: np.ndarray  # [R, D, permute] inbox page for what each permute brings; num_inbox where not stored
    num_inbox: int  # one page more takes what nobody stores


def allocate_inbox(table: RoundTable) -> Inbox:
    """Inbox pages for every message of `table` that waits."""
    device, rounds, message = table.schedule.columns.device, table.rounds, table.dependencies.message
    reader = np.flatnonzero(message >= 0)
    sender = message[reader]
    permute = _permute_index(table, sender, reader)  # -1 for a message that stays on its device
    there = np.where(permute >= 0, table.travels[sender], rounds[sender])  # the round at whose end the message is there
    previous = np.where(table.schedule.columns.position[reader] > 0, rounds[reader - 1], -1)
    passed_on = np.maximum(there, previous)  # the round at whose end it goes to its reader
    source = np.where(permute >= 0, FIRST_PERMUTE - permute, OWN)

    waits = np.flatnonzero(there < passed_on)
    units, num_inbox = allocate_per_device(device[reader[waits]], there[waits], passed_on[waits], np.ones_like(waits))
    page = np.full(len(reader), num_inbox)
    page[waits] = [taken[0] for taken in units]
    source[waits] = page[waits]

    shape = (table.num_rounds, table.schedule.num_devices)
    next_source = np.full(shape, NOTHING, np.int32)
    keeps = rounds[reader] - 1 - passed_on  # idle rounds from there on
    kept = np.repeat(passed_on, keeps) + 1 + np.arange(keeps.sum()) - np.repeat(np.cumsum(keeps) - keeps, keeps)
    next_source[kept, np.repeat(device[reader], keeps)] = OWN
    next_source[passed_on, device[reader]] = source
    keep = np.full(shape, num_inbox, np.int32)
    stays = permute < 0
    keep[there[stays], device[reader[stays]]] = page[stays]
    arrival = np.full((*shape, max(map(len, table.permutes))), num_inbox, np.int32)
    arrival[there[~stays], device[reader[~stays]], permute[~stays]] = page[~stays]
    return Inbox(next_source, keep, arrival, num_inbox)


def _permute_index(table: RoundTable, sender: np.ndarray, reader: np.ndarray) -> np.ndarray:
    """[M] which permute of its round carries each message; -1 where sender and reader are one device."""
    device, num_devices = table.schedule.columns.device, table.schedule.num_devices
    index = np.full((table.body_rounds, num_devices, num_devices), -1)
    for position, permutes in enumerate(table.permutes):
        for k, pairs in enumerate(permutes):
            index[position, *np.array(pairs).T] = k
    source, target = device[sender], device[reader]
    return np.where(source == target, -1, index[table.position[table.travels[sender]], source, target])
