"""Messages: outputs of stages and their gradients, and the inbox in which they wait.

A message travels in the round after the action that produced it, or in a later one. Every device runs one program, so
every device has as many inbox entries as the one that needs most. The entry of each message follows from its lifetime
and is decided before anything is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from jaxpipe.lowering.lifetimes import Places, place
from jaxpipe.lowering.permutes import Pair, Permutes, permutes_of
from jaxpipe.lowering.table import STEADY, RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer
from jaxpipe.schedules.schedule import MESSAGE_KINDS, Schedule

MESSAGES_AT_WORK = 3  # besides the waiting ones: the current one, and the one sent, which is held twice

# The source of the message of a device's next action, if not an inbox entry (>= 0): `Messages._chosen` of the program
# compares `next_source` with each of these. NOTHING in `next_out` sends the latest output (`Messages._leaving`).
NOTHING = -1  # no message: the F of stage 0, a W, or an idle device
OWN = -2  # the output of this round's action; in an idle round, the message that the device already holds
FIRST_PERMUTE = -3  # FIRST_PERMUTE - k: the message from permute k of this round


class Messages(Transfer[RoundTable]):
    """What an action reads of another device; which ones there are follows from the table's actions alone."""

    name = "messages"
    unit = "message"
    unit_bytes: ClassVar = {"message": lambda sizes: sizes.message}
    kind_of_bytes = "messages"

    def payloads(self, table: RoundTable) -> Payloads:
        """All messages; each is of size one."""
        device = table.schedule.columns.device
        sender, reader = table.between(self.name)
        return Payloads(table.send_round[sender], device[sender], device[reader], np.zeros_like(sender), size=1)

    def permutes(self, table: RoundTable) -> Permutes:
        """[type][permute] -> pairs; permutes carry the latest outputs of devices."""
        payloads = self.payloads(table)
        round_type = table.round_type[payloads.round]
        num_devices = table.schedule.num_devices
        # One integer for each, which sorts faster than three.
        keys = np.unique((round_type * num_devices + payloads.source) * num_devices + payloads.target)
        of_type: list[list[Pair]] = [[] for _ in range(table.num_types)]
        for link, target in zip(*(part.tolist() for part in np.divmod(keys, num_devices)), strict=True):
            index, source = divmod(link, num_devices)
            of_type[index].append((source, target))
        return tuple(map(permutes_of, of_type))

    def grids(self, table: RoundTable) -> Inbox:
        """The inbox."""
        return allocate_inbox(
            table.schedule,
            message=table.sender(self.name),
            rounds=table.rounds,
            send_round=table.send_round,
            round_type=table.round_type,
            permutes=table.permutes[self.name],
            previous=_previous(table),
            placed=table.placed,
        )

    def buffers(self, table: RoundTable) -> dict[str, int]:
        """Messages that wait, those at work, one for each permute of a round, and that of a pair."""
        at_work = MESSAGES_AT_WORK + table.num_lanes(self.name) + table.schedule.has_pairs
        return {"message": table.grids[self.name].num_inbox + at_work}

    def waiting(self, table: RoundTable) -> dict[str, int]:
        """Messages in the inbox."""
        return {"message": table.grids[self.name].num_inbox}


MESSAGES = Messages()


@dataclass(frozen=True, eq=False)
class Inbox:
    """The source of each action's message, and the entries of messages that wait.

    At the end of a round, messages that arrived and the action's output are passed directly to the device's next action
    if it reads them; an idle device keeps them. If other actions come before the reader, the message is stored in an
    inbox entry until the last of these is done. So is an output that has not left when its device has another one.
    """

    next_source: np.ndarray  # [R, D] where the message of the next action comes from
    next_out: np.ndarray  # [R, D] entry of the message that leaves in the next round; NOTHING for the latest output
    store_own: np.ndarray  # [R, D] entry for the action's own output; num_inbox if it is not stored
    store_arrival: np.ndarray  # [R, D, permute] entry for the message of each permute; num_inbox if not stored
    num_inbox: int  # entries; the program has one more, for messages that nobody reads
    renumbered: np.ndarray | None = None  # [D, entry] as in `lifetimes.Places`


def allocate_inbox(
    schedule: Schedule,
    *,
    message: np.ndarray,
    rounds: np.ndarray,
    send_round: np.ndarray,
    round_type: np.ndarray,
    permutes: Permutes,
    previous: np.ndarray,
    placed: Callable[[np.ndarray, np.ndarray, np.ndarray], Places] = place,
) -> Inbox:
    """Allocates an entry for every message that waits.

    Example:
        Two devices, two microbatches, all forwards first. On device 1 the output of each F, a gradient, is read by a
        B that follows another action: it waits for that one in an entry, from the end of its round (store_own) to
        the end of the round before its reader's (next_source). 2 means no entry.

        >>> from jaxpipe.lowering import lower
        >>> from jaxpipe.schedules import build
        >>> table = lower(build("gpipe", num_devices=2, num_microbatches=2), rolled=False)
        >>> table.kind[:6, 1].tolist()  # -1 is idle, 0 an F, 1 a B
        [-1, -1, 0, 0, 1, 1]
        >>> table.grids["messages"].store_own[:6, 1].tolist()
        [2, 2, 0, 1, 2, 2]
        >>> table.grids["messages"].next_source[:6, 1].tolist()  # -1 nothing, -3 the message of permute 0
        [-1, -3, -3, 0, 1, -1]
    """
    device = schedule.columns.device
    reader = np.flatnonzero(message >= 0)
    sender = message[reader]
    owner = device[reader]
    links = device[sender], owner
    permute = _carrying_permute(*links, round_type[send_round[sender]], permutes, schedule.num_devices)
    is_own = permute < 0

    # A message is available at the end of one round and handed over at the end of the same or a later one, when the
    # device is done with the action before its reader. In between it waits in an inbox entry.
    available = np.where(is_own, rounds[sender], send_round[sender])
    handed_over = np.maximum(available, previous[reader])
    waits = np.flatnonzero(available < handed_over)
    held = _held(schedule, sender[~is_own], rounds, send_round)
    entries = placed(
        np.concatenate([owner[waits], device[held]]),
        np.concatenate([available[waits], rounds[held]]),
        np.concatenate([handed_over[waits], send_round[held] - 1]),
    )
    entry = np.full(len(reader), entries.num_units)
    entry[waits] = entries.first[: len(waits)]
    source = np.where(is_own, OWN, FIRST_PERMUTE - permute)
    source[waits] = entries.last[: len(waits)]

    shape = (len(round_type), schedule.num_devices)
    next_source = np.full(shape, NOTHING, np.int32)
    # After the handover the device idles and keeps the message until the round before its reader's.
    num_idle = rounds[reader] - 1 - handed_over
    next_source[_ranges(handed_over + 1, num_idle), np.repeat(owner, num_idle)] = OWN
    next_source[handed_over, owner] = source
    store_own = np.full(shape, entries.num_units, np.int32)
    store_own[available[is_own], owner[is_own]] = entry[is_own]
    store_own[rounds[held], device[held]] = entries.first[len(waits) :]
    next_out = np.full(shape, NOTHING, np.int32)
    # Read at the end of the round before it travels.
    next_out[send_round[held] - 1, device[held]] = entries.last[len(waits) :]
    store_arrival = np.full((*shape, max(map(len, permutes))), entries.num_units, np.int32)
    store_arrival[available[~is_own], owner[~is_own], permute[~is_own]] = entry[~is_own]
    return Inbox(next_source, next_out, store_own, store_arrival, entries.num_units, entries.renumbered)


def _previous(table: RoundTable) -> np.ndarray:
    """[A] round of the action before each on its device, with several calls in one in the middle; -1 for none."""
    if table.num_calls == 1:
        return np.where(table.schedule.columns.position > 0, np.roll(table.rounds, 1), -1)
    device = table.schedule.columns.device
    length = table.rounds_per_call
    previous = np.zeros(len(device), int)
    for d in range(table.schedule.num_devices):
        of_device = np.flatnonzero(device == d)
        busy = np.flatnonzero(table.kind[table.calls[STEADY], d] >= 0)
        before = np.concatenate([[busy[-1] - length], busy])  # the last round of a call precedes the next call
        at = table.rounds[of_device] % length
        previous[of_device] = table.rounds[of_device] - at + before[np.searchsorted(busy, at)]
    return previous


def _held(schedule: Schedule, sender: np.ndarray, rounds: np.ndarray, send_round: np.ndarray) -> np.ndarray:
    """The senders of messages that have not left when their device has another output, or lets another one leave."""
    columns = schedule.columns
    leaves = rounds + 1
    leaves[sender] = send_round[sender]
    output = np.flatnonzero(columns.is_kind(*MESSAGE_KINDS))
    output = output[np.lexsort((rounds[output], columns.device[output]))]
    # The rounds of all devices one after the other.
    before = columns.device[output] * (leaves.max(initial=0) + 1)
    begins = before + rounds[output]
    ends = before + leaves[output]
    is_held = np.zeros(len(output), bool)
    is_held[:-1] = begins[1:] < ends[:-1]
    # An earlier output may leave after later ones, so the maximum over all before.
    is_held[1:] |= np.maximum.accumulate(ends)[:-1] > begins[1:]
    return np.intersect1d(output[is_held], sender)


def _ranges(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The ranges of length `length` from `start` on, concatenated.

    Example:
        >>> _ranges(np.array([3, 9, 7]), np.array([2, 0, 1])).tolist()
        [3, 4, 7]
    """
    before = np.cumsum(length) - length
    return np.arange(length.sum()) + np.repeat(start - before, length)


def _carrying_permute(
    source: np.ndarray, target: np.ndarray, round_type: np.ndarray, permutes: Permutes, num_devices: int
) -> np.ndarray:
    """[M] the permute of its round that carries each message; -1 if source and target are the same device."""
    # -1 stays where no permute has the pair; messages of this round have one by construction.
    index = np.full((len(permutes), num_devices, num_devices), -1)
    for i, of_round in enumerate(permutes):
        for k, pairs in enumerate(of_round):
            index[i, *np.array(pairs).T] = k
    return np.where(source == target, -1, index[round_type, source, target])
