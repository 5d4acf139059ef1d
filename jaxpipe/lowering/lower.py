"""From a schedule to the round table that the SPMD program executes.

Among the ways to fold a schedule's rounds into one loop body, the first that is as fast as the asynchronous clock
whatever actions cost, else the best at the costs that are expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from jaxpipe.lowering.checkerboard import CHECKERBOARD_ROUNDS, checkerboard_rounds
from jaxpipe.lowering.exchange import NOTHING_EXCHANGED, with_exchange
from jaxpipe.lowering.fitted import fitted_rounds
from jaxpipe.lowering.in_step import IN_STEP_ROUNDS, in_step_rounds
from jaxpipe.lowering.meetings import meetings
from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.lowering.rounds import (
    ALTERNATING_ROUNDS,
    alternating_rounds,
    earliest_rounds,
    in_forwards,
    periodic_rounds,
)
from jaxpipe.lowering.segment import Segment
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfers import NOTHING_PARKED, meeting_rounds, park, without_transfers
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.passes.rows import next_multiple
from jaxpipe.schedules.schedule import Kind, Schedule

MAX_BODY_ROUNDS = 8
# A fold is judged at several costs, since the program is compiled before they are known: halves of a backward as long
# as each other, and either of them the longer one; the last with a transfer of a tenth of a forward.
JUDGES = (
    Costs(backward=1.0, input_gradient=0.5, weight_gradient=0.5),
    Costs(backward=2.0, input_gradient=1.3, weight_gradient=0.7),
    Costs(backward=2.0, input_gradient=0.7, weight_gradient=1.3),
    Costs(backward=3.0, input_gradient=1.5, weight_gradient=1.5),
    Costs(backward=1.0, input_gradient=0.5, weight_gradient=0.5, transfer=0.1, gradient_messages=0.0),
)
GOOD_ENOUGH_RATIOS = np.array([1.001, 1.001, 1.001, 1.001, 1.02])
LIKELY_TRANSFER = 0.02  # of a message, in forwards
GOOD_ENOUGH_IF_LIKELY = 1.01  # with likely transfers, of rounds fitted to the costs that are expected
SHARES_OF_SLACK = (0.0, 0.5, 1.0)  # for which actions wait, to fit


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
        costs: what actions are expected to cost, where it matters: for schedules with EVICT and LOAD, whose paired
            devices meet in a round, and where none waits for the other only if rounds keep step with time; and for
            those of which no fold is fast whatever actions cost, as are most with backwards in two parts. By default a
            backward of two forwards, or an I and a W of one each.
    """
    if layers_per_stage is None:
        layers_per_stage = (1,) * schedule.num_stages
    problem = _Problem(schedule, without_transfers(schedule), layers_per_stage)
    if rolled:
        table = problem.best_table(costs or Costs())
    else:
        rounds = earliest_rounds(problem.steps)
        table = problem.fold(rounds, body_rounds=int(rounds.max()) + 1)
    return with_exchange(table, schedule)


@dataclass(frozen=True)
class _Problem:
    """What is folded."""

    schedule: Schedule
    steps: Schedule  # its compute actions alone
    layers_per_stage: tuple[int, ...]

    def best_table(self, costs: Costs) -> RoundTable:
        """The first candidate that is good whatever actions cost, or else the best at `costs`.

        That is one as fast as the asynchronous clock while transfers take no time, if there is any, and of these or
        else of all the fastest with likely transfers. Rounds fitted to `costs` are for backwards in two parts, and for
        where no other fold is as fast.
        """
        judges, limits = JUDGES, GOOD_ENOUGH_RATIOS
        if self.schedule.has_transfers:
            judges, limits = (costs,), GOOD_ENOUGH_RATIOS[:1]
        without_exchange = replace(costs, gradient_messages=0.0)
        transfer = LIKELY_TRANSFER * float(np.mean(costs.forward))
        expected = [without_exchange, replace(without_exchange, transfer=transfer)]
        everyone = [*judges, *expected]
        asynchronous = np.array([simulate(self.steps, judge).makespan for judge in everyone])
        best, least = None, (True, float("inf"))
        for table in self.candidates(costs):
            slowdown = replay_makespans(self.as_judged(table), everyone) / asynchronous
            without, likely = slowdown[len(judges) :]
            if (slowdown[: len(judges)] <= limits).all() and without <= limits[0]:
                return table
            if (key := (without > limits[0], likely)) < least:
                best, least = table, key
        for table in self.fitted(costs) if self.schedule.has_halves or least[0] else ():
            without, likely = replay_makespans(self.as_judged(table), expected) / asynchronous[len(judges) :]
            if (key := (without > limits[0], likely)) < least:
                best, least = table, key
            if key <= (False, GOOD_ENOUGH_IF_LIKELY):
                break
        assert best is not None
        return best

    def as_judged(self, table: RoundTable) -> RoundTable:
        """`table`; of backwards in two parts with the exchange, whose devices may wait for each other."""
        return with_exchange(table, self.schedule) if self.schedule.has_halves else table

    def candidates(self, costs: Costs) -> Iterator[RoundTable]:
        """Tables to choose from, the smallest programs first.

        Rounds that keep step with time come first where paired devices meet. Periodic rounds come before others,
        since their body positions have the fewest pairs. Where forwards and backwards keep apart (GPipe), a segment
        for each spares either the other's permutes.
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
        if self.schedule.num_replicas > 1:
            yield self.fold(checkerboard_rounds(self.steps), body_rounds=CHECKERBOARD_ROUNDS)
        yield self.fold(alternating_rounds(self.steps), body_rounds=ALTERNATING_ROUNDS)
        rounds = earliest_rounds(self.steps)
        for body_rounds in (1, 2, 4, 8):
            yield self.fold(rounds, body_rounds=body_rounds)
        rounds, travels = in_step_rounds(self.steps, in_forwards(costs))
        yield self.fold(rounds, body_rounds=IN_STEP_ROUNDS, travels=travels)

    def fitted(self, costs: Costs) -> Iterator[RoundTable]:
        """Tables of rounds that are fitted to `costs`, the smallest programs first."""
        *small, largest = meetings(self.steps)
        for body in (*small, largest):
            for share in SHARES_OF_SLACK:
                fitted = fitted_rounds(self.steps, costs, body, share_of_slack=share, may_wait=body is largest)
                if fitted is not None:
                    rounds, travels = fitted
                    yield self.fold(rounds, body_rounds=body.body_rounds, travels=travels)

    def fold(
        self,
        rounds: np.ndarray,
        *,
        body_rounds: int,
        cut: int = 0,
        lengths: np.ndarray | None = None,
        travels: np.ndarray | None = None,
    ) -> RoundTable:
        """The table with a body of `body_rounds`, or one before and one after round `cut`.

        Args:
            rounds: [A].
            body_rounds: in one repetition.
            cut: 0 for one segment.
            lengths: [kinds] of actions, if `rounds` keep step with time.
            travels: [A] rounds of the messages, with one segment; by default those after `rounds`.
        """
        start = next_multiple(cut, body_rounds)
        rounds = np.where(rounds >= cut, rounds + start - cut, rounds)
        travels = rounds + 1 if travels is None else travels
        stop = start + next_multiple(int(rounds.max()) + 1 - start, body_rounds)
        bounds = [0, start, stop] if cut else [0, stop]
        segments = tuple(Segment(*ends, body_rounds) for ends in pairwise(bounds))
        table = RoundTable(
            self.steps, self.layers_per_stage, rounds, travels, segments, NOTHING_PARKED, NOTHING_EXCHANGED
        )
        if not self.schedule.has_transfers:
            return table
        meets = meeting_rounds(self.steps, rounds, table.position, lengths)
        return replace(table, parked=park(self.schedule, self.steps, self.layers_per_stage, rounds, meets))
