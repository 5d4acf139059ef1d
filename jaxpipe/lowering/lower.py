"""From a schedule to the round table that the SPMD program executes.

Among the ways to fold a schedule's rounds into one loop body, the first whose replayed makespan equals
the asynchronous one, else the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.lowering.rounds import earliest_rounds, periodic_rounds
from jaxpipe.lowering.table import RoundTable, Segment
from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.simulate import Costs, simulate

MAX_BODY_ROUNDS = 8
# A fold is judged at several costs, since the program is compiled before they are known; the last with a
# transfer of a tenth of a forward.
JUDGES = (
    Costs(backward=1.0),
    Costs(backward=2.0),
    Costs(backward=3.0),
    Costs(backward=1.0, transfer=0.1),
)
GOOD_ENOUGH_RATIOS = np.array([1.001, 1.001, 1.001, 1.02])


def lower(schedule: Schedule, *, layers_per_stage: tuple[int, ...] | None = None, rolled: bool = True) -> RoundTable:
    """The round table of a schedule.

    Args:
        schedule: one that keeps the rules, or one of forwards alone.
        layers_per_stage: [stage] layers, each with residual pages of its own; by default one each.
        rolled: False makes the body as long as the step, for debugging: the program grows with N.
    """
    if layers_per_stage is None:
        layers_per_stage = (1,) * schedule.num_stages
    if not rolled:
        rounds = earliest_rounds(schedule)
        return _fold(schedule, layers_per_stage, rounds, body_rounds=int(rounds.max()) + 1)
    asynchronous = [simulate(schedule, costs).makespan for costs in JUDGES]
    best, least_excess = None, float("inf")
    for table in _candidates(schedule, layers_per_stage):
        excess = float((replay_makespans(table, JUDGES) / asynchronous / GOOD_ENOUGH_RATIOS).max())
        if excess < least_excess:
            best, least_excess = table, excess
        if excess <= 1.0:
            break
    assert best is not None
    return best


def _candidates(schedule: Schedule, layers_per_stage: tuple[int, ...]) -> Iterator[RoundTable]:
    """Tables to choose from, the smallest programs first.

    Periodic rounds come before earliest ones, since their body positions have the fewest pairs. Where
    forwards and backwards keep apart (GPipe), a segment for each spares either the other's permutes.
    """
    is_forward = schedule.columns.is_kind(Kind.F)
    for period in range(1, MAX_BODY_ROUNDS + 1):
        rounds = periodic_rounds(schedule, period)
        if rounds is None:
            continue
        cut = int(rounds[is_forward].max()) + 1
        if (rounds[~is_forward] >= cut).all() and not is_forward.all():
            yield _fold(schedule, layers_per_stage, rounds, body_rounds=period, cut=cut)
        else:
            yield _fold(schedule, layers_per_stage, rounds, body_rounds=period)
    rounds = earliest_rounds(schedule)
    for body_rounds in range(1, MAX_BODY_ROUNDS + 1):
        yield _fold(schedule, layers_per_stage, rounds, body_rounds=body_rounds)


def _fold(
    schedule: Schedule, layers_per_stage: tuple[int, ...], rounds: np.ndarray, *, body_rounds: int, cut: int = 0
) -> RoundTable:
    """The table with a body of `body_rounds`, or one before and one after round `cut`."""
    start = _round_up(cut, body_rounds)
    rounds = np.where(rounds >= cut, rounds + start - cut, rounds)
    stop = start + _round_up(int(rounds.max()) + 1 - start, body_rounds)
    bounds = [0, start, stop] if cut else [0, stop]
    segments = tuple(Segment(*ends, body_rounds) for ends in pairwise(bounds))
    return RoundTable(schedule, layers_per_stage, rounds, segments)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
