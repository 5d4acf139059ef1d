"""Rounds in step, for rows with S and T: all devices do one forward's length of work between two rounds of meetings.

Devices that are in different places of their rows would hold each other up in the collectives of a split head, which
none ends before all have begun. `jaxpipe.lowering.phases` has the rounds of rows in which all devices do the same kinds
of action at a time.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.transfers.split_head import Collective
from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies, execution_order
from jaxpipe.schedules.schedule import BACKWARD_KINDS, HEAD_KINDS, Kind, Schedule


class StepRound(enum.IntEnum):
    """The rounds of a step, in turn."""

    MEET = 0  # messages and collectives travel; an action of several steps that is under way takes this round
    S = 1
    T = 2
    OTHERS = 3  # actions of one step, and longer ones in whose time nobody meets


STEP_ROUNDS = len(StepRound)


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
            are backwards. An action of more than two steps needs this, since it can take one round of meetings alone.
    """
    columns = compute.columns
    needs = dependencies(compute)
    last = compute.num_stages - 1
    turn = int(lengths[np.unique(columns.kind)].sum())
    meeting = _Meetings(turn)
    if together:
        alone = _steps(compute, needs, lengths, meeting)
        is_last = columns.is_kind(Kind.F) & (columns.stage == last)
        backwards = alone[columns.is_kind(*BACKWARD_KINDS)]
        residues = np.bincount((alone[is_last] + lengths[Kind.F]) % turn)
        meeting = _Meetings(turn, int(residues.argmax()), int(backwards.min(initial=alone.max())))
    start = _steps(compute, needs, lengths, meeting)
    end = start + lengths[columns.kind]
    rounds = STEP_ROUNDS * start + _ROUND_OF_KIND[columns.kind]
    inside = np.array([meeting.at(step) for step in (start + 1).tolist()])  # the first step in which others meet
    is_met = inside < end
    rounds[is_met] = STEP_ROUNDS * inside[is_met] + StepRound.MEET
    steps = np.arange(end.max() + 1 + turn)
    meets = np.repeat(np.array([meeting.at(step) == step for step in steps.tolist()]), STEP_ROUNDS)
    # `meets` has whole steps so far; of each only the first round.
    meets &= np.arange(len(meets)) % STEP_ROUNDS == StepRound.MEET
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
_ROUND_OF_KIND = np.full(len(Kind), StepRound.OTHERS)
_ROUND_OF_KIND[[Kind.S, Kind.T]] = StepRound.S, StepRound.T


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
    columns = compute.columns
    last = compute.num_stages - 1
    order, _ = execution_order(compute, needs)
    kind, position, device, stage = (
        values.tolist() for values in (columns.kind, columns.position, columns.device, columns.stage)
    )
    message = needs.message.tolist()
    all_of = needs.all_of.tolist()
    length = lengths.tolist()
    place = _ROUND_OF_KIND.tolist()
    start = [0] * len(kind)
    end = [0] * len(kind)
    # A collective carries one microbatch a round: the next action that needs it waits for the next meeting.
    earliest: dict[tuple[int, Collective | None], int] = {}  # (device, collective) -> of the next action that needs it
    for i in order:
        own = kind[i]
        step = 0
        if position[i]:
            step = end[i - 1]
            if start[i - 1] == end[i - 1] == step:  # an S or T in the same step
                # An S and then a T fit into one step; a T and then an S, or two S, do not.
                step += place[kind[i - 1]] >= place[own]
        if message[i] >= 0:
            step = max(step, end[message[i]])
        if met := [sender for sender in all_of[i] if sender >= 0]:
            # What an S or T has computed leaves with the next step.
            step = max(step, meeting.at(max(end[sender] + (kind[sender] in HEAD_KINDS) for sender in met)))
        at_start = _OF_START.get(own) if own in HEAD_KINDS or stage[i] == 0 else None
        at_end = _OF_END.get(own) if stage[i] == (last if own == Kind.F else 0) else None
        for collective in (at_start, at_end):
            step = max(step, earliest.get((device[i], collective), 0))
        start[i] = step
        end[i] = step + length[own]
        for collective, after in ((at_start, step + 1), (at_end, end[i])):
            if collective is not None:
                earliest[device[i], collective] = meeting.at(after)
    return np.array(start)
