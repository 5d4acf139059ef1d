"""Lowers a schedule to the round table that the SPMD program executes.

Among the ways to fold a schedule's rounds into one loop body, the first that is as fast as the asynchronous clock
at all costs tried is taken, else the best at the expected costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from jaxpipe.lowering.body import Segment
from jaxpipe.lowering.couplings import coupled_bodies
from jaxpipe.lowering.exchange import NO_EXCHANGE, plan_exchange
from jaxpipe.lowering.fitted import fitted_rounds
from jaxpipe.lowering.parking import NO_PARKED_PAGES, open_rounds, park_pages
from jaxpipe.lowering.replay import replay, replay_makespans
from jaxpipe.lowering.rounds import (
    ALTERNATING_ROUNDS,
    CHECKERBOARD_ROUNDS,
    LOCKSTEP_ROUNDS,
    alternating_rounds,
    checkerboard_rounds,
    earliest_rounds,
    in_forwards,
    lockstep_rounds,
    periodic_rounds,
)
from jaxpipe.lowering.table import RoundTable
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.passes.rows import next_multiple
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind, Schedule

MAX_BODY_ROUNDS = 8
# A fold is evaluated at several costs, since the program is compiled before they are known: I and W of equal length,
# and either of them longer; the last costs have a transfer of a tenth of a forward.
EVALUATION_COSTS = (
    Costs(backward=1.0, input_gradient=0.5, weight_gradient=0.5),
    Costs(backward=2.0, input_gradient=1.3, weight_gradient=0.7),
    Costs(backward=2.0, input_gradient=0.7, weight_gradient=1.3),
    Costs(backward=3.0, input_gradient=1.5, weight_gradient=1.5),
    Costs(backward=1.0, input_gradient=0.5, weight_gradient=0.5, transfer=0.1, gradient_messages=0.0),
)
# Limits of the SPMD makespan over the asynchronous one.
GOOD_ENOUGH_RATIOS = np.array([1.001, 1.001, 1.001, 1.001, 1.02])
LIKELY_TRANSFER = 0.02  # time of a message, in forwards
GOOD_ENOUGH_IF_LIKELY = 1.01  # with likely transfers, for rounds fitted to the expected costs
SLACK_FRACTIONS = (0.0, 0.5, 1.0)  # fractions of their slack for which actions wait, to find rounds that fit


def lower(
    schedule: Schedule,
    *,
    layers_per_stage: tuple[int, ...] | None = None,
    rolled: bool = True,
    costs: Costs | None = None,
) -> RoundTable:
    """Lowers a schedule to its round table.

    Args:
        schedule: a schedule that keeps the rules, or one of forwards alone.
        layers_per_stage: [stage] layers, each with its own residual pages; by default one per stage.
        rolled: whether rounds are rolled into loops; False, for debugging, makes a program that grows with N.
        costs: expected costs of actions. They matter for schedules with EVICT and LOAD, whose paired
            devices meet in rounds and do not wait for each other only if rounds follow time; and for
            schedules without a fold that is fast at all costs, such as most with split backwards. By default a
            backward takes two forwards, an I and a W one each.

    Example:
        1F1B on four devices, sixteen microbatches: a body of four rounds, repeated.

        >>> from jaxpipe.schedules import build
        >>> table = lower(build("1f1b", num_devices=4, num_microbatches=16))
        >>> table.segments
        (Segment(start=0, stop=76, num_body_rounds=4),)
    """
    folding = Folding(schedule, layers_per_stage or (1,) * schedule.num_stages)
    if rolled:
        table = folding.best_table(costs or Costs())
    else:
        rounds = earliest_rounds(folding.compute)
        table = folding.fold(rounds, num_body_rounds=int(rounds.max()) + 1)
    return with_exchange(table, schedule)


def spmd_makespan(schedule: Schedule, costs: Costs) -> float:
    """The makespan of `schedule`, lowered for and replayed at `costs` of its stages: a `clock` for `optimize`."""
    return replay(lower(schedule, costs=costs), costs).makespan


def compute_schedule(schedule: Schedule) -> Schedule:
    """A schedule of the compute actions of `schedule` alone; `schedule` itself if it has no others."""
    if schedule.columns.is_kind(*COMPUTE_KINDS).all():
        return schedule
    rows = tuple(tuple(action for action in row if action.kind in COMPUTE_KINDS) for row in schedule.rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows)


def with_exchange(table: RoundTable, schedule: Schedule) -> RoundTable:
    """Adds the gradient exchange of `schedule` to `table`, in its own segment.

    Args:
        table: the table of the compute actions of `schedule`, without exchange.
        schedule: a schedule with SYNC actions; a stage without them is summed at the end of the step.
    """
    if schedule.num_replicas == 1 or not table.has_backward:
        return table
    *before, final = table.segments
    tail, exchange = plan_exchange(schedule, table.schedule, table.layers_per_stage, table.rounds, final)
    segments = (*before, Segment(final.start, tail.start, final.num_body_rounds), tail)
    return replace(table, segments=tuple(segment for segment in segments if segment.num_repetitions), exchange=exchange)


@dataclass(frozen=True)
class Folding:
    """A schedule whose rounds are to be folded into loop bodies."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]

    @cached_property
    def compute(self) -> Schedule:
        """The compute actions of the schedule alone."""
        return compute_schedule(self.schedule)

    def best_table(self, costs: Costs) -> RoundTable:
        """The first candidate that is good at all costs tried, or else the best at `costs`.

        The best is one that is as fast as the asynchronous clock if transfers take no time, if any is; among these, or
        else among all, the fastest with likely transfers. Rounds fitted to `costs` are tried for split backwards, and
        if no other fold is as fast.
        """
        # Costs of evaluation first, then the expected costs, without transfers and with likely ones.
        evaluated, limits = EVALUATION_COSTS, GOOD_ENOUGH_RATIOS
        if self.schedule.has_transfers:
            evaluated, limits = (costs,), GOOD_ENOUGH_RATIOS[:1]
        without_exchange = replace(costs, gradient_messages=0.0)
        transfer = LIKELY_TRANSFER * float(np.mean(costs.forward))
        expected = [without_exchange, replace(without_exchange, transfer=transfer)]
        all_costs = [*evaluated, *expected]
        asynchronous = np.array([simulate(self.compute, each).makespan for each in all_costs])

        best, least = None, (True, float("inf"))  # the least (is slow without transfers, slowdown with likely ones)
        for table in self.candidates(costs):
            slowdown = replay_makespans(self._as_evaluated(table), all_costs) / asynchronous
            without, likely = slowdown[len(evaluated) :]
            if (slowdown[: len(evaluated)] <= limits).all() and without <= limits[0]:
                return table
            if (key := (without > limits[0], likely)) < least:
                best, least = table, key
        for table in self.fitted_candidates(costs) if self.schedule.has_split_backward or least[0] else ():
            slowdown = replay_makespans(self._as_evaluated(table), expected) / asynchronous[len(evaluated) :]
            without, likely = slowdown
            if (key := (without > limits[0], likely)) < least:
                best, least = table, key
            if key <= (False, GOOD_ENOUGH_IF_LIKELY):
                break
        assert best is not None
        return best

    def _as_evaluated(self, table: RoundTable) -> RoundTable:
        """The table to time: `table`, with the exchange if backwards are split, since devices may wait for it."""
        return with_exchange(table, self.schedule) if self.schedule.has_split_backward else table

    def candidates(self, costs: Costs) -> Iterator[RoundTable]:
        """Tables to choose from, the smallest programs first.

        Rounds that follow time come first if paired devices meet. Periodic rounds come before others,
        since their body rounds have the fewest pairs. If forwards and backwards are separate (GPipe), a segment
        for each avoids the permutes of the other.
        """
        is_forward = self.compute.columns.is_kind(Kind.F)
        for lengths in [in_forwards(costs), None] if self.schedule.has_transfers else [None]:
            for period in range(1, MAX_BODY_ROUNDS + 1):
                rounds = periodic_rounds(self.compute, period, lengths=lengths)
                if rounds is None:
                    continue
                cut = int(rounds[is_forward].max()) + 1
                if (rounds[~is_forward] >= cut).all() and not is_forward.all():
                    yield self.fold(rounds, num_body_rounds=period, cut=cut, lengths=lengths)
                else:
                    yield self.fold(rounds, num_body_rounds=period, lengths=lengths)
        if self.schedule.num_replicas > 1:
            yield self.fold(checkerboard_rounds(self.compute), num_body_rounds=CHECKERBOARD_ROUNDS)
        yield self.fold(alternating_rounds(self.compute), num_body_rounds=ALTERNATING_ROUNDS)
        rounds = earliest_rounds(self.compute)
        for num_body_rounds in (1, 2, 4, 8):
            yield self.fold(rounds, num_body_rounds=num_body_rounds)
        rounds, send_round = lockstep_rounds(self.compute, in_forwards(costs))
        yield self.fold(rounds, num_body_rounds=LOCKSTEP_ROUNDS, send_round=send_round)

    def fitted_candidates(self, costs: Costs) -> Iterator[RoundTable]:
        """Tables whose rounds are fitted to `costs`, the smallest programs first."""
        *small, largest = coupled_bodies(self.compute)
        for body in (*small, largest):
            for fraction in SLACK_FRACTIONS:
                fitted = fitted_rounds(self.compute, costs, body, slack_fraction=fraction, may_wait=body is largest)
                if fitted is not None:
                    rounds, send_round = fitted
                    yield self.fold(rounds, num_body_rounds=body.num_body_rounds, send_round=send_round)

    def fold(
        self,
        rounds: np.ndarray,
        *,
        num_body_rounds: int,
        cut: int = 0,
        lengths: np.ndarray | None = None,
        send_round: np.ndarray | None = None,
    ) -> RoundTable:
        """Rolls rounds into a body of `num_body_rounds`, or into one body before and one after round `cut`.

        Args:
            rounds: [A] rounds of the compute actions.
            num_body_rounds: body rounds of one repetition.
            cut: the round at which the second segment begins; 0 for one segment.
            lengths: [kinds] lengths of actions, if `rounds` follow time.
            send_round: [A] rounds of the messages, only with one segment; by default those after `rounds`.
        """
        # Rounds after the cut move to the end of a repetition of the first body.
        start = next_multiple(cut, num_body_rounds)
        rounds = np.where(rounds >= cut, rounds + start - cut, rounds)
        send_round = rounds + 1 if send_round is None else send_round
        stop = start + next_multiple(int(rounds.max()) + 1 - start, num_body_rounds)
        bounds = [0, start, stop] if cut else [0, stop]
        segments = tuple(Segment(first, end, num_body_rounds) for first, end in pairwise(bounds))
        table = RoundTable(
            self.compute, self.layers_per_stage, rounds, send_round, segments, NO_PARKED_PAGES, NO_EXCHANGE
        )
        if not self.schedule.has_transfers:
            return table
        is_open = open_rounds(self.compute, rounds, table.body_round, lengths)
        return replace(table, parked=park_pages(self.schedule, self.compute, self.layers_per_stage, rounds, is_open))
