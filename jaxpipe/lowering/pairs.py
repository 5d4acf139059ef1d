"""Pairs in rounds: an action that is two takes three rounds of its device, of which the middle one computes.

A round has one action of a device, one message for it and one message of it. A pair reads two and leaves two:

    round      r       r+1      r+2
    kind       TAKE    PAIR     PUT
    reads      x       dy       .
    computes   .       F, B     .
    leaves     .       dx       y

Goes in: a schedule of compute actions with pairs. Comes out: the same with a PUT behind each pair; the F of a pair is
then its TAKE, and the backward its PAIR. So pages, messages and their entries are those of actions as ever.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxpipe.schedules.passes.overlap import apart, joined
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Action, Kind, Schedule, once
from jaxpipe.sharding import Shard

KINDS_WITH_ROUNDS = COMPUTE_KINDS | {Kind.PUT}


def compute_schedule(schedule: Schedule) -> Schedule:
    """A schedule of the compute actions of `schedule` alone; `schedule` itself if it has no others."""
    if schedule.columns.is_kind(*KINDS_WITH_ROUNDS).all():
        return schedule
    rows = tuple(tuple(action for action in row if action.kind in KINDS_WITH_ROUNDS) for row in schedule.rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows)


def pairs_in_rounds(schedule: Schedule, shard: Shard = Shard.OPTIMIZER, recomputed: tuple[int, ...] = ()) -> Schedule:
    """`schedule` with a PUT behind each pair.

    Two actions are the pairs that `computed_pairs` parts. So are all where what is shared travels behind all layers,
    and where layers have several forms.

    Args:
        shard, recomputed: as `lower` takes them.
    """
    if not schedule.has_pairs:
        return schedule
    if recomputed or shard.splits_gradients:
        return apart(schedule)
    kept = computed_pairs(schedule)
    return replace(kept, rows=tuple(map(_with_puts, kept.rows)))


@once
def computed_pairs(schedule: Schedule) -> Schedule:
    """`schedule` with those of its pairs that the program computes as one action.

    Two actions are those that have an I, or the first F or the last B of a stage, behind whose layers weights and
    gradients travel. So are all pairs without flush, and beside a split head.
    """
    if not schedule.has_pairs:
        return schedule
    if schedule.delays or schedule.has_head_actions:
        return apart(schedule)
    columns = schedule.columns
    first = np.flatnonzero(columns.partner > np.arange(len(columns.partner)))
    stays = (
        columns.is_kind(Kind.B)[first + 1] & ~_is_end(schedule, Kind.F)[first] & ~_is_end(schedule, Kind.B)[first + 1]
    )
    return joined(schedule, first[stays].tolist())


def _is_end(schedule: Schedule, kind: Kind) -> np.ndarray:
    """[A] whether it is the first F, or the last B, of its stage on its device."""
    columns = schedule.columns
    actions = np.flatnonzero(columns.is_kind(kind))[:: 1 if kind is Kind.F else -1]
    owner = columns.device[actions] * schedule.num_stages + columns.stage[actions]
    _, first = np.unique(owner, return_index=True)
    is_end = np.zeros(len(columns.kind), bool)
    is_end[actions[first]] = True
    return is_end


def _with_puts(row: tuple[Action, ...]) -> tuple[Action, ...]:
    actions: list[Action] = []
    for action in row:
        first = actions[-1] if actions else action
        if not first.joined:
            actions.append(action)
        else:
            actions += [action, first._replace(kind=Kind.PUT, joined=False)]
    return tuple(actions)


def kinds_in_rounds(compute: Schedule) -> np.ndarray:
    """[A] kinds, with TAKE and PAIR for the halves of a pair."""
    columns = compute.columns
    is_half = columns.partner >= 0
    return np.where(is_half & columns.is_kind(Kind.F), Kind.TAKE, np.where(is_half, Kind.PAIR, columns.kind))


def of_pairs(compute: Schedule, times: np.ndarray, ratio: float) -> np.ndarray:
    """[A] times of actions as rounds have them: PAIR takes `ratio` of what both halves do, TAKE nothing."""
    partner = compute.columns.partner
    both = ratio * (times + times[partner])
    is_first = partner > np.arange(len(partner))
    return np.where(is_first, 0.0, np.where(partner >= 0, both, times))
