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

So devices that are in different places of their rows would hold each other up. `stepped_rounds` keeps all of them in
step: every device does one forward's length of work between two rounds in which any of them meet.
`jaxpipe.lowering.phases` has the rounds of rows in which all devices do the same kinds of action at a time.

With two replicas, whose last stages are at either end of the pipeline, a round may have each of them twice, once for a
microbatch of each replica.

What waits is in an entry, an array like a message, and in a slot, what S leaves for T; both have the same index on
every device. A microbatch has an entry from LOOKUP to its first F, one from its last F over S and T to its first
backward, and one from its last backward to SCATTER.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.lifetimes import allocate
from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies, execution_order
from jaxpipe.schedules.schedule import HEAD_KINDS, Kind, Schedule

NO_MICROBATCH = -1
STEP_ROUNDS = 4  # of a step: one in which devices meet and longer actions run, one for S, one for T, one for the others


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

    microbatch: np.ndarray  # [R, replica, collective] its microbatch; NO_MICROBATCH if the round has none
    entry: np.ndarray  # [R, replica, collective] the entry that it reads or writes; num_entries if it has none
    slot: np.ndarray  # [microbatch] the slot between S and T
    entry_in: np.ndarray  # [A] the entry that an action reads; num_entries if none
    entry_out: np.ndarray  # [A] the entry that an action writes; num_entries if none
    num_entries: int
    num_slots: int


def plan_collectives(schedule: Schedule, rounds: np.ndarray, meets: np.ndarray) -> Collectives:
    """The collectives of a schedule with S and T.

    Each comes as soon as it may, LOOKUP as late. `rounds` are such that no round has the same one of a replica twice.

    Args:
        schedule: a schedule of compute actions alone.
        rounds: [A] round of each action.
        meets: [R] whether a round may have collectives.
    """
    columns, last, num_rounds = schedule.columns, schedule.num_stages - 1, len(meets)

    def extremes(*kinds: Kind, stage: int) -> tuple[np.ndarray, np.ndarray]:
        """[microbatch] the first and the last round of the actions of these kinds and this stage."""
        chosen = np.flatnonzero(columns.is_kind(*kinds) & (columns.stage == stage))
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
        return allowed[np.searchsorted(allowed, first) - 1]

    first_f, last_f = extremes(Kind.F, stage=0)[0], extremes(Kind.F, stage=last)[1]
    (first_s, last_s), (_, last_t) = extremes(Kind.S, stage=last), extremes(Kind.T, stage=last)
    chosen = {
        Collective.LOOKUP: before(first_f),
        Collective.BROADCAST: after(last_f),
        Collective.STATISTICS: after(last_s),
    }
    lives = [(chosen[Collective.LOOKUP], first_f), (last_f, last_s)]
    if has_backward := bool(columns.is_kind(Kind.B, Kind.I).any()):
        turn, end = extremes(Kind.B, Kind.I, stage=last)[0], extremes(Kind.B, Kind.I, stage=0)[1]
        chosen |= {Collective.REDUCE: after(last_t), Collective.SCATTER: after(end)}
        lives[1:] = [(last_f, turn), (end, chosen[Collective.SCATTER])]
    start, stop = (np.concatenate(each) for each in zip(*lives, strict=True))
    units, num_entries = allocate(start, stop, np.ones_like(start))
    entries = np.array([taken[0] for taken in units]).reshape(len(lives), -1)
    if not has_backward:
        entries = np.append(entries, np.full((1, entries.shape[1]), num_entries), axis=0)
    embedded, head, scattered = entries

    shape, replica = (num_rounds, schedule.num_replicas, len(Collective)), schedule.replica_of_microbatch
    microbatch, entry = np.full(shape, NO_MICROBATCH), np.full(shape, num_entries)
    for collective, of_microbatch in chosen.items():
        # Else one would be lost, and a program of wrong gradients made.
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
        ((Kind.B, Kind.I), last, head, None),
        ((Kind.B, Kind.I), 0, None, scattered),
    ):
        actions = np.flatnonzero(columns.is_kind(*kinds) & (columns.stage == stage))
        for target, of_microbatch in ((entry_in, read), (entry_out, written)):
            if of_microbatch is not None:
                target[actions] = of_microbatch[columns.microbatch[actions]]
    return Collectives(microbatch, entry, slot, entry_in, entry_out, num_entries, num_slots)


# ---- Rounds in step


@dataclass(frozen=True, eq=False)
class MetRounds:
    """Rounds of a schedule with S and T, and those in which all devices may meet."""

    rounds: np.ndarray  # [A] of the actions
    send_round: np.ndarray  # [A] of their messages
    meets: np.ndarray  # [R] whether all devices may meet, as far as actions go and one meeting beyond
    num_positions: int  # rounds after which types repeat


def stepped_rounds(compute: Schedule, lengths: np.ndarray, *, together: bool) -> MetRounds:
    """Rounds in which all devices stay in step.

    A step has the length of a forward, in which a device does an F, or a part of a longer action, and before it an S
    and a T, which have no length of their own. Messages and collectives travel in the first round of a step. An action
    of several steps is running then, and takes that round. So at each meeting every device is between two actions, or
    in that of the round.

    Args:
        compute: a schedule of compute actions alone, with S and T.
        lengths: [kinds] lengths of actions, in forwards.
        together: whether all collectives of a turn (one F of a device with its backward) are in one round, once there
            are backwards. It is needed where an action takes more than two steps, since it can be in one round alone.
    """
    columns, needs = compute.columns, dependencies(compute)
    last, turn = compute.num_stages - 1, int(lengths[np.unique(columns.kind)].sum())
    meeting = _Meetings(turn)
    if together:
        alone = _steps(compute, needs, lengths, meeting)
        is_last = columns.is_kind(Kind.F) & (columns.stage == last)
        backwards = alone[columns.is_kind(Kind.B, Kind.I)]
        residues = np.bincount((alone[is_last] + lengths[Kind.F]) % turn)
        meeting = _Meetings(turn, int(residues.argmax()), int(backwards.min(initial=alone.max())))
    start = _steps(compute, needs, lengths, meeting)
    end = start + lengths[columns.kind]
    rounds = STEP_ROUNDS * start + _PLACE[columns.kind]
    inside = np.array([meeting.at(step) for step in (start + 1).tolist()])  # the first step in which others meet
    is_met = inside < end
    rounds[is_met] = STEP_ROUNDS * inside[is_met]
    steps = np.arange(end.max() + 1 + turn)
    meets = np.repeat(np.array([meeting.at(step) == step for step in steps.tolist()]), STEP_ROUNDS)
    meets &= np.arange(len(meets)) % STEP_ROUNDS == 0
    return MetRounds(rounds, STEP_ROUNDS * end, meets, num_positions=STEP_ROUNDS)


# The collective that goes with the step in which an action starts, and with that in which it ends. S and T take none.
_OF_START: dict[int, Collective] = {
    Kind.F: Collective.LOOKUP,
    Kind.S: Collective.STATISTICS,
    Kind.T: Collective.REDUCE,
}
_OF_END: dict[int, Collective] = {
    Kind.F: Collective.BROADCAST,
    Kind.B: Collective.SCATTER,
    Kind.I: Collective.SCATTER,
}
_PLACE = np.full(len(Kind), STEP_ROUNDS - 1)
_PLACE[[Kind.S, Kind.T]] = 1, 2


@dataclass(frozen=True)
class _Meetings:
    """The steps in which all devices may meet: every one, or from step `since` on those congruent to `residue`."""

    turn: int
    residue: int | None = None
    since: int = 0

    def at(self, step: int) -> int:
        """The first such step from `step` on."""
        if self.residue is None or step <= self.since:
            return step
        return step + (self.residue - step) % self.turn


def _steps(compute: Schedule, needs: Dependencies, lengths: np.ndarray, meeting: _Meetings) -> np.ndarray:
    """[A] the earliest step of each action in which no collective is in the round of the same one before."""
    columns, last = compute.columns, compute.num_stages - 1
    order, _ = execution_order(compute, needs)
    kind, position, device, stage = (
        each.tolist() for each in (columns.kind, columns.position, columns.device, columns.stage)
    )
    message, all_of, length = needs.message.tolist(), needs.all_of.tolist(), lengths.tolist()
    place = _PLACE.tolist()
    start, end = [0] * len(kind), [0] * len(kind)
    earliest: dict[tuple[int, Collective | None], int] = {}  # (device, collective) -> of the next action that needs it
    for i in order:
        own = kind[i]
        step = 0
        if position[i]:
            step = end[i - 1]
            if start[i - 1] == end[i - 1] == step:  # an S or T in the same step
                step += place[kind[i - 1]] >= place[own]
        if message[i] >= 0:
            step = max(step, end[message[i]])
        if met := [each for each in all_of[i] if each >= 0]:
            # What an S or T has found leaves with the next step.
            step = max(step, meeting.at(max(end[each] + (kind[each] in HEAD_KINDS) for each in met)))
        at_start = _OF_START.get(own) if own in HEAD_KINDS or stage[i] == 0 else None
        at_end = _OF_END.get(own) if stage[i] == (last if own == Kind.F else 0) else None
        for collective in (at_start, at_end):
            step = max(step, earliest.get((device[i], collective), 0))
        start[i], end[i] = step, step + length[own]
        for collective, after in ((at_start, step + 1), (at_end, end[i])):
            if collective is not None:
                earliest[device[i], collective] = meeting.at(after)
    return np.array(start)
