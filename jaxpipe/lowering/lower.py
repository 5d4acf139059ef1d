"""From a schedule to the round table that the SPMD program executes.

Among the ways to fold a schedule's rounds into one loop body, the first whose replayed makespan equals
the asynchronous one, else the best.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.lowering.rounds import earliest_rounds, in_forwards, periodic_rounds
from jaxpipe.lowering.table import RoundTable, Segment
from jaxpipe.lowering.transfers import NOTHING_PARKED, meeting_rounds, park, without_transfers
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


def lower(
    schedule: Schedule,
    *,
    layers_per_stage: tuple[int, ...] | None = None,
    rolled: bool = True,
    costs: Costs | None = None,
) -> RoundTable:
    """The round table of a schedule.

    Args:
        schedule: one that keeps the rules, or one of forwards alone.
        layers_per_stage: [stage] layers, each with residual pages of its own; by default one each.
        rolled: False makes the body as long as the step, for debugging: the program grows with N.
        costs: what actions are expected to cost; only a schedule with EVICT and LOAD needs to know. Its paired
            devices meet in a round, and only where rounds keep step with time does none wait for the other.
            By default a backward of two forwards.
    """
    if layers_per_stage is None:
        layers_per_stage = (1,) * schedule.num_stages
    problem = _Problem(schedule, without_transfers(schedule), layers_per_stage)
    if not rolled:
        rounds = earliest_rounds(problem.steps)
        return problem.fold(rounds, body_rounds=int(rounds.max()) + 1)
    judges, good_enough = JUDGES, GOOD_ENOUGH_RATIOS
    if schedule.has_transfers:
        judges, good_enough = (costs or Costs(),), GOOD_ENOUGH_RATIOS[:1]
    asynchronous = [simulate(problem.steps, judge).makespan for judge in judges]
    best, least_excess = None, float("inf")
    for table in problem.candidates(judges[0]):
        excess = float((replay_makespans(table, judges) / asynchronous / good_enough).max())
        if excess < least_excess:
            best, least_excess = table, excess
        if excess <= 1.0:
            break
    assert best is not None
    return best


@dataclass(frozen=True)
class _Problem:
    """What is folded."""

    schedule: Schedule
    steps: Schedule  # the same without EVICT and LOAD
    layers_per_stage: tuple[int, ...]

    def candidates(self, costs: Costs) -> Iterator[RoundTable]:
        """Tables to choose from, the smallest programs first.

        Rounds that keep step with time come first where paired devices meet. Periodic rounds come before earliest
        ones, since their body positions have the fewest pairs. Where forwards and backwards keep apart (GPipe), a
        segment for each spares either the other's permutes.
        """
        is_forward = self.steps.columns.is_kind(Kind.F)
        for lengths in [in_forwards(costs), None] if self.schedule.has_transfers else [None]:
            for period in range(1, MAX_BODY_ROUNDS + 1):
                rounds = periodic_rounds(self.steps, period, lengths=lengths)
                if rounds is None:
                    continue
                cut = int(rounds[is_forward].max()) + 1
                if (rounds[~is_forward] >= cut).all() and not is_forward.all():
                    yield self.fold(rounds, body_rounds=period, cut=cut, lengths=lengths)
                else:
                    yield self.fold(rounds, body_rounds=period, lengths=lengths)
        rounds = earliest_rounds(self.steps)
        for body_rounds in range(1, MAX_BODY_ROUNDS + 1):
            yield self.fold(rounds, body_rounds=body_rounds)

    def fold(
        self, rounds: np.ndarray, *, body_rounds: int, cut: int = 0, lengths: np.ndarray | None = None
    ) -> RoundTable:
        """The table with a body of `body_rounds`, or one before and one after round `cut`.

        Args:
            rounds: [A].
            body_rounds: in one repetition.
            cut: 0 for one segment.
            lengths: [kinds] of actions, if `rounds` keep step with time.
        """
        start = _round_up(cut, body_rounds)
        rounds = np.where(rounds >= cut, rounds + start - cut, rounds)
        stop = start + _round_up(int(rounds.max()) + 1 - start, body_rounds)
        bounds = [0, start, stop] if cut else [0, stop]
        segments = tuple(Segment(*ends, body_rounds) for ends in pairwise(bounds))
        table = RoundTable(self.steps, self.layers_per_stage, rounds, segments, NOTHING_PARKED)
        if not self.schedule.has_transfers:
            return table
        meets = meeting_rounds(self.steps, rounds, table.position, lengths)
        return replace(table, parked=park(self.schedule, self.steps, self.layers_per_stage, rounds, meets))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
