"""Collectives over all of `pipe`: what they carry, their rounds, and where it is kept before and after.

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

What waits is in an entry, an array like a message, and in a slot, what S leaves for T; both have the same index on
every device. A microbatch has an entry from LOOKUP to its first F, one from its last F over S and T to its first
backward, and one from its last backward to SCATTER.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.lifetimes import allocate
from jaxpipe.schedules.schedule import Kind, Schedule

NO_MICROBATCH = -1


class Collective(enum.IntEnum):
    """A collective over all devices of `pipe`; see the module."""

    LOOKUP = 0
    BROADCAST = 1
    STATISTICS = 2
    REDUCE = 3
    SCATTER = 4


@dataclass(frozen=True, eq=False)
class Collectives:
    """The collectives of a step, and the storage of what they carry."""

    microbatch: np.ndarray  # [R, collective] its microbatch; NO_MICROBATCH if the round has none
    entry: np.ndarray  # [R, collective] the entry that it reads or writes; num_entries if it has none
    slot: np.ndarray  # [microbatch] the slot between S and T
    entry_in: np.ndarray  # [A] the entry that an action reads; num_entries if none
    entry_out: np.ndarray  # [A] the entry that an action writes; num_entries if none
    num_entries: int
    num_slots: int


def plan_collectives(schedule: Schedule, rounds: np.ndarray, num_rounds: int) -> Collectives | None:
    """The collectives of a schedule with S and T; None for one without.

    Each comes as soon as it may, LOOKUP as late. No round has the same one twice: all rows have S and T in one order.

    Args:
        schedule: a schedule of compute actions alone.
        rounds: [A] round of each action.
        num_rounds: rounds of a step.
    """
    if not schedule.has_head_actions:
        return None
    columns, last = schedule.columns, schedule.num_stages - 1

    def extremes(*kinds: Kind, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """[microbatch] the first and the last round of the actions of these kinds and this stage."""
        chosen = np.flatnonzero(columns.is_kind(*kinds) & (columns.stage == stage))
        first, final = np.full((2, schedule.num_microbatches), [[num_rounds], [-1]])
        np.minimum.at(first, columns.microbatch[chosen], rounds[chosen])
        np.maximum.at(final, columns.microbatch[chosen], rounds[chosen])
        return first, final

    first_f, last_f = extremes(Kind.F, stage=0)[0], extremes(Kind.F, stage=last)[1]
    (first_s, last_s), (_, last_t) = extremes(Kind.S, stage=last), extremes(Kind.T, stage=last)
    chosen = {
        Collective.LOOKUP: first_f - 1,
        Collective.BROADCAST: last_f + 1,
        Collective.STATISTICS: last_s + 1,
    }
    lives = [(chosen[Collective.LOOKUP], first_f), (last_f, last_s)]
    if has_backward := bool(columns.is_kind(Kind.B, Kind.I).any()):
        turn, end = extremes(Kind.B, Kind.I, stage=last)[0], extremes(Kind.B, Kind.I, stage=0)[1]
        chosen |= {Collective.REDUCE: last_t + 1, Collective.SCATTER: end + 1}
        lives[1:] = [(last_f, turn), (end, end + 1)]
    start, stop = (np.concatenate(each) for each in zip(*lives, strict=True))
    units, num_entries = allocate(start, stop, np.ones_like(start))
    entries = np.array([taken[0] for taken in units]).reshape(len(lives), -1)
    if not has_backward:
        entries = np.append(entries, np.full((1, entries.shape[1]), num_entries), axis=0)
    embedded, head, scattered = entries

    microbatch = np.full((num_rounds, len(Collective)), NO_MICROBATCH)
    entry = np.full((num_rounds, len(Collective)), num_entries)
    for collective, of_microbatch in chosen.items():
        microbatch[of_microbatch, collective] = np.arange(schedule.num_microbatches)
        of = {Collective.LOOKUP: embedded, Collective.SCATTER: scattered}.get(collective, head)
        entry[of_microbatch, collective] = of
    units, num_slots = allocate(first_s, last_t, np.ones_like(first_s))
    slot = np.array([taken[0] for taken in units])

    entry_in, entry_out = np.full((2, len(rounds)), num_entries)
    for kinds, stage, read, written in (
        ((Kind.F,), 0, embedded, None),
        ((Kind.F,), last, None, head),
        ((Kind.S,), last, head, None),
        ((Kind.T,), last, head, head),
        ((Kind.B, Kind.I), last, head, None),
        ((Kind.B, Kind.I), 0, None, scattered),
    ):
        actions = np.flatnonzero(columns.is_kind(*kinds) & (columns.stage == stage))
        for target, of_microbatch in ((entry_in, read), (entry_out, written)):
            if of_microbatch is not None:
                target[actions] = of_microbatch[columns.microbatch[actions]]
    return Collectives(microbatch, entry, slot, entry_in, entry_out, num_entries, num_slots)
