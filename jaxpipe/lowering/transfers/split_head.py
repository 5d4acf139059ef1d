"""The split head: collectives over all of `pipe`, what they carry, their rounds, and where it is kept.

A vocabulary that is split over all devices has five of them for a microbatch:

| collective | carries | after | before |
|---|---|---|---|
| LOOKUP | the tokens' rows of the table, each from its owner, summed | | the first stage's F |
| BROADCAST | the output of the last stage | its F | every S |
| STATISTICS | the statistics of every device's logits | every S | every T |
| REDUCE | the gradient of the last stage's output, summed | every T | the last stage's B or I |
| SCATTER | the gradient of the embedding, to the owners of the rows | the first stage's B or I | |

Like a message, each begins with a round and ends before the next one: it travels while the actions of its round
compute. All devices take part, so all have it in the same round, and none ends that round before all have begun it.

`jaxpipe.lowering.stepped` and `jaxpipe.lowering.phases` have rounds in which devices do not hold each other up.

With two replicas, whose last stages are at either end of the pipeline, a round may have each of them twice, once for a
microbatch of each replica.

What waits is in an entry, an array like a message, and in a slot, what S leaves for T; both have the same index on
every device. A microbatch has an entry from LOOKUP to its first F, one from its last F over S and T to its first
backward, and one from its last backward to SCATTER.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from jaxpipe.lowering.lifetimes import allocate
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Kind, Schedule

# In a round without the collective. The program then looks up any microbatch, whose rows nobody reads, and adds no
# gradient of the embedding (`program.channels.split_head`).
NO_MICROBATCH = -1


class Collective(enum.IntEnum):
    """A collective over all devices of `pipe`; see the module."""

    LOOKUP = 0
    BROADCAST = 1
    STATISTICS = 2
    REDUCE = 3
    SCATTER = 4


@dataclass(frozen=True, eq=False)
class SplitHead(Transfer[RoundTable]):
    """The collectives of a step, and the storage of what they carry."""

    microbatch: np.ndarray  # [R, replica, collective] its microbatch; NO_MICROBATCH if the round has none
    entry: np.ndarray  # [R, replica, collective] the entry that it reads or writes; num_entries if it has none
    slot: np.ndarray  # [microbatch] the slot between S and T
    entry_in: np.ndarray  # [A] the entry that an action reads; num_entries if none
    entry_out: np.ndarray  # [A] the entry that an action writes; num_entries if none
    num_entries: int
    num_slots: int

    name = "split_head"
    unit_bytes: ClassVar = {"message": lambda sizes: sizes.message, "head slot": lambda sizes: sizes.head_slot}
    kind_of_bytes = "head"

    @property
    def meets(self) -> np.ndarray:
        """[R] whether the round has any collective."""
        return (self.microbatch != NO_MICROBATCH).any(axis=(1, 2))

    def payloads(self, table: RoundTable) -> Payloads:
        """Each collective of each replica, as a lane of its own."""
        rounds, replica, collective = np.nonzero(self.microbatch != NO_MICROBATCH)
        return Payloads(rounds, replica, np.zeros_like(rounds), collective, size=1)

    def of_type(self, table: RoundTable) -> np.ndarray:
        """[type, replica, collective] whether any round of the type has it; then all of its rounds run it."""
        runs = np.zeros((table.num_types, *self.microbatch.shape[1:]), bool)
        # The table may have more rounds, which other transfers have added: none of them has a collective.
        np.logical_or.at(runs, table.round_type[: len(self.microbatch)], self.microbatch != NO_MICROBATCH)
        return runs

    def num_collectives(self, table: RoundTable) -> np.ndarray:
        """[type] of all replicas."""
        return self.of_type(table).sum(axis=(1, 2))

    def grids(self, table: RoundTable) -> HeadGrids:
        """Microbatches, entries and slots, round by round."""
        num_devices = table.schedule.num_devices

        def everywhere(values: np.ndarray) -> np.ndarray:
            return np.broadcast_to(values[:, None], (len(values), num_devices, *values.shape[1:]))

        exchanged = self.microbatch[..., Collective.STATISTICS]
        return HeadGrids(
            microbatch=everywhere(self.microbatch),
            entry=everywhere(self.entry),
            exchanged_slot=everywhere(np.where(exchanged == NO_MICROBATCH, self.num_slots, self.slot[exchanged])),
            entry_in=table.grid(self.entry_in, otherwise=self.num_entries),
            entry_out=table.grid(self.entry_out, otherwise=self.num_entries),
            slot=table.grid(self.slot[table.schedule.columns.microbatch], otherwise=self.num_slots),
        )

    def buffers(self, table: RoundTable) -> dict[str, int]:
        """Entries and slots, one of each for what nobody reads."""
        return {"message": self.num_entries + 1, "head slot": self.num_slots + 1}

    def waiting(self, table: RoundTable) -> dict[str, int]:
        """Entries."""
        return {"message": self.num_entries + 1}


class HeadGrids(NamedTuple):
    """A device's line of the split head in each round."""

    microbatch: np.ndarray  # [R, D, replica, collective]
    entry: np.ndarray  # [R, D, replica, collective]
    exchanged_slot: np.ndarray  # [R, D, replica] of STATISTICS
    entry_in: np.ndarray  # [R, D]
    entry_out: np.ndarray  # [R, D]
    slot: np.ndarray  # [R, D]


def plan_collectives(schedule: Schedule, rounds: np.ndarray, meets: np.ndarray) -> SplitHead:
    """The collectives of a schedule with S and T.

    Each collective comes as soon as it may, LOOKUP as late. `rounds` are such that no round has the same one of a
    replica twice.
    """
    columns = schedule.columns
    last = schedule.num_stages - 1
    num_rounds = len(meets)

    def extremes(*kinds: Kind, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """[microbatch] the first and the last round of the actions of these kinds and this stage."""
        chosen = np.flatnonzero(columns.is_kind(*kinds) & (columns.stage == stage))
        # Neutral for minimum and maximum.
        first, final = np.full((2, schedule.num_microbatches), [[num_rounds], [-1]])
        np.minimum.at(first, columns.microbatch[chosen], rounds[chosen])
        np.maximum.at(final, columns.microbatch[chosen], rounds[chosen])
        return first, final

    allowed = np.flatnonzero(meets)

    def after(last: np.ndarray) -> np.ndarray:
        """[microbatch] the first rounds of collectives after these."""
        return allowed[np.searchsorted(allowed, last, side="right")]

    def before(first: np.ndarray) -> np.ndarray:
        """[microbatch] the last rounds of collectives before these."""
        # - 1: `searchsorted` gives the first that is not before.
        return allowed[np.searchsorted(allowed, first) - 1]

    first_f = extremes(Kind.F, stage=0)[0]
    last_f = extremes(Kind.F, stage=last)[1]
    first_s, last_s = extremes(Kind.S, stage=last)
    _, last_t = extremes(Kind.T, stage=last)
    chosen = {
        Collective.LOOKUP: before(first_f),
        Collective.BROADCAST: after(last_f),
        Collective.STATISTICS: after(last_s),
    }
    lives = [(chosen[Collective.LOOKUP], first_f), (last_f, last_s)]
    if has_backward := bool(columns.is_kind(*BACKWARD_KINDS).any()):
        turn = extremes(*BACKWARD_KINDS, stage=last)[0]
        end = extremes(*BACKWARD_KINDS, stage=0)[1]
        chosen |= {Collective.REDUCE: after(last_t), Collective.SCATTER: after(end)}
        lives[1:] = [(last_f, turn), (end, chosen[Collective.SCATTER])]
    start, stop = (np.concatenate(moments) for moments in zip(*lives, strict=True))
    units, num_entries = allocate(start, stop, np.ones_like(start))
    entries = np.array([taken[0] for taken in units]).reshape(len(lives), -1)
    # Nothing is scattered: an entry that nobody reads.
    if not has_backward:
        entries = np.append(entries, np.full((1, entries.shape[1]), num_entries), axis=0)
    embedded, head, scattered = entries

    shape = (num_rounds, schedule.num_replicas, len(Collective))
    replica = schedule.replica_of_microbatch
    microbatch = np.full(shape, NO_MICROBATCH)
    entry = np.full(shape, num_entries)
    for collective, of_microbatch in chosen.items():
        # Two in one round would leave one microbatch out, and gradients would be wrong without a word.
        assert len(np.unique(np.stack([of_microbatch, replica]), axis=1).T) == len(of_microbatch)
        microbatch[of_microbatch, replica, collective] = np.arange(schedule.num_microbatches)
        of = {Collective.LOOKUP: embedded, Collective.SCATTER: scattered}.get(collective, head)
        entry[of_microbatch, replica, collective] = of
    units, num_slots = allocate(first_s, last_t, np.ones_like(first_s))
    slot = np.array([taken[0] for taken in units])

    entry_in, entry_out = np.full((2, len(rounds)), num_entries)
    for kinds, stage, read, written in (
        ((Kind.F,), 0, embedded, None),
        ((Kind.F,), last, None, head),
        ((Kind.S,), last, head, None),
        ((Kind.T,), last, head, head),
        (BACKWARD_KINDS, last, head, None),
        (BACKWARD_KINDS, 0, None, scattered),
    ):
        actions = np.flatnonzero(columns.is_kind(*kinds) & (columns.stage == stage))
        for target, of_microbatch in ((entry_in, read), (entry_out, written)):
            if of_microbatch is not None:
                target[actions] = of_microbatch[columns.microbatch[actions]]
    return SplitHead(microbatch, entry, slot, entry_in, entry_out, num_entries, num_slots)
