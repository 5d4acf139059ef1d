"""Lowers a schedule to the round table that the SPMD program executes.

Among the ways to give actions rounds, the first is taken that is as fast as the asynchronous clock at all costs tried,
traces few actions and sends few messages in vain; else, of those that are fast at the expected costs, the one that
sends least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from jaxpipe.lowering.blocked import FAST_IF_BLOCKING, blocked_step
from jaxpipe.lowering.couplings import coupled_bodies
from jaxpipe.lowering.fitted import fitted_rounds
from jaxpipe.lowering.hidden_data import Hidden, with_hidden_data
from jaxpipe.lowering.pages import PageMoves
from jaxpipe.lowering.pairs import compute_schedule, pairs_in_rounds
from jaxpipe.lowering.parking import Parking, most_parked
from jaxpipe.lowering.phases import phased_rounds
from jaxpipe.lowering.replay import replay, replay_makespans
from jaxpipe.lowering.round_types import MAX_TRACED_ACTIONS, by_pairs, refine
from jaxpipe.lowering.rounds import (
    ALTERNATING_ROUNDS,
    CHECKERBOARD_ROUNDS,
    LOCKSTEP_ROUNDS,
    alternating_rounds,
    checkerboard_rounds,
    earliest_rounds,
    lockstep_rounds,
    periodic_rounds,
)
from jaxpipe.lowering.stepped import MetRounds, stepped_rounds
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers import traffic_of
from jaxpipe.lowering.transfers.parked_pages import ParkedPages, park_pages
from jaxpipe.lowering.transfers.replica_gradients import plan_exchange
from jaxpipe.lowering.transfers.split_head import SplitHead, plan_collectives
from jaxpipe.lowering.turns import period_of
from jaxpipe.lowering.without_flush import lower_stream
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.sharding import NOTHING_KEPT, KeptChunks, Shard

MAX_PERIOD = 8  # rounds
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
MESSAGE_TIMES = (0.0, 0.02, 0.1)  # time of a message, in forwards: none, a likely one, one over a slow link
# Limits of the same ratio at the expected costs, for each of these.
FAST = np.array([1.001, 1.01, 1.03])
FEW_SENT = 1.5  # messages sent over messages asked for, of the busiest device
SLACK_FRACTIONS = (0.0, 1.0)  # fractions of their slack for which actions wait, to find rounds that fit
MORE_SLACK = (0.5,)  # tried only if no table is fast: fits take longest


def lower(
    schedule: Schedule,
    *,
    layers_per_stage: tuple[int, ...] | None = None,
    rolled: bool = True,
    costs: Costs | None = None,
    blocking: bool = False,
    behind_layers: bool = False,
    shard: Shard = Shard.OPTIMIZER,
    kept: KeptChunks = NOTHING_KEPT,
    recomputed: tuple[int, ...] = (),
) -> RoundTable:
    """Lowers a schedule to its round table; a schedule without flush to the table of its calls.

    Args:
        schedule: a schedule that keeps the rules, or one of forwards alone.
        layers_per_stage: [stage] layers, each with its own residual pages; by default one per stage.
        rolled: whether rounds share loop bodies; False, for debugging, makes a program that grows with N.
        costs: expected costs of actions; by default a backward takes two forwards, an I and a W one each. Costs matter
            for schedules with EVICT and LOAD, whose paired devices meet in rounds and do not wait for each other only
            if rounds follow time; and for schedules without a fold that is fast at all costs, such as most with split
            backwards.
        blocking: whether a permute holds up both of its devices, as gloo's does in a process of one thread. On a GPU a
            permute travels while both compute.
        behind_layers: whether gathers of weights and sums of gradients over `data` travel behind layers of the first F
            and of the last B or W of each chunk, else before and after actions; with a flush alone.
        shard: what devices with equal copies share; those that share more than the optimizer's state gather and sum
            behind the layers of every action.
        kept: what a device keeps from action to action of what it shares.
        recomputed: [stage] the first layers of each that backward computes again; empty if all layers save alike, as
            without flush.

    Example:
        1F1B on four devices, sixteen microbatches: 74 rounds of six types, which trace F three times, B twice.

        >>> from jaxpipe.schedules import build
        >>> table = lower(build("1f1b", num_devices=4, num_microbatches=16))
        >>> table.num_rounds, table.num_types, table.num_traced_actions
        (74, 6, 5)
    """
    schedule = pairs_in_rounds(schedule, shard, recomputed)
    if schedule.delays:
        return lower_stream(schedule, layers_per_stage=layers_per_stage, costs=costs, blocking=blocking)
    folding = Folding(schedule, layers_per_stage or (1,) * schedule.num_stages, recomputed)
    hidden = partial(with_hidden_data, shard=shard, kept=kept)
    if rolled:
        return folding.best_table(costs or Costs(), blocking=blocking, hidden=hidden if behind_layers else None)
    rounds = earliest_rounds(folding.compute)
    table = with_exchange(folding.fold(rounds, num_positions=int(rounds.max()) + 1), schedule)
    return hidden(table) if behind_layers else table


def spmd_makespan(schedule: Schedule, costs: Costs) -> float:
    """The makespan of `schedule`, lowered for and replayed at `costs` of its stages: a `clock` for `optimize`."""
    return replay(lower(schedule, costs=costs), costs).makespan


def with_exchange(table: RoundTable, schedule: Schedule) -> RoundTable:
    """Adds the gradient exchange of `schedule` to `table` of its compute actions; its rounds have their own types."""
    if schedule.num_replicas == 1 or not table.has_backward:
        return table
    exchange = plan_exchange(schedule, table.schedule, table.layers_per_stage, table.rounds)
    # Rounds behind the last one go on with the types of the turns.
    stop = max(int(exchange.sends.round.max()) + 1, table.num_rounds)
    period = period_of(table.round_type)
    more = np.arange(stop - table.num_rounds)
    is_rolled = period < table.num_rounds
    behind = table.round_type[table.num_rounds - period + more % period] if is_rolled else table.num_types + more
    round_type = np.append(table.round_type, behind)
    # From the turn of the first exchange on types are others, so that earlier rounds are not traced with it.
    first = int(exchange.sends.round.min())
    first -= (first - stop) % period if is_rolled else 0
    round_type[max(first, 0) :] += round_type.max() + 1
    _, round_type = np.unique(round_type, return_inverse=True)
    # Permutes of a round begin in this order: all that travels between two devices comes before collectives.
    meet = [transfer for transfer in table.kinds_of_traffic if transfer.num_collectives(table).any()]
    travel = [transfer for transfer in table.kinds_of_traffic if transfer not in meet]
    return replace(table, round_type=round_type, kinds_of_traffic=(*travel, exchange, *meet))


@dataclass(frozen=True)
class Folding:
    """A schedule whose rounds are to be folded into loop bodies."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    recomputed: tuple[int, ...] = ()  # [stage], as in `RoundTable`

    @cached_property
    def compute(self) -> Schedule:
        """The compute actions of the schedule alone."""
        return compute_schedule(self.schedule)

    @property
    def parking(self) -> Parking:
        """The pages that the schedule parks."""
        return Parking(self.schedule, self.compute, self.layers_per_stage, self.recomputed)

    def best_table(self, costs: Costs, *, blocking: bool, hidden: Hidden | None = None) -> RoundTable:
        """The table of the candidate that comes first in this order; one that passes 1 to 5 ends the search.

        1. within `FAST` of the asynchronous clock at `costs` without transfers,
        2. and with messages of each of `MESSAGE_TIMES`; of candidates that are not, the fastest with the second of
           these, to a hundredth;
        3. within `GOOD_ENOUGH_RATIOS` at all other costs; at `costs` alone with EVICT and LOAD;
        4. few traced actions;
        5. few messages sent in vain;
        6. few entries of the inbox.

        Where permutes block, 1 alone decides, by `FAST_IF_BLOCKING`. Where backwards are split, candidates are timed
        with the exchange, since devices may wait for it.
        """
        # Costs of evaluation first, then the expected costs with each of the transfers.
        evaluated = EVALUATION_COSTS
        limits = GOOD_ENOUGH_RATIOS
        if self.schedule.parks_pages:
            evaluated = (costs,)
            limits = GOOD_ENOUGH_RATIOS[:1]
        forward = float(np.mean(costs.forward))
        transfers = [transfer * forward for transfer in MESSAGE_TIMES]
        all_costs = [*evaluated, *(replace(costs, gradient_messages=0.0, transfer=time) for time in transfers)]
        # The bound of any table: no device waits for a round there.
        asynchronous = np.array([simulate(self.compute, tried).makespan for tried in all_costs])

        def num_inbox(table: RoundTable) -> int:
            return table.grids["messages"].num_inbox

        is_timed_whole = self.schedule.num_replicas == 1 or self.schedule.has_split_backward
        best = None  # (candidate, the same as timed)
        least = ()  # its key: less is better, in the order above
        # Stretches that are merged would let all devices meet for a head in rounds in which few have to.
        divided = by_pairs if blocking or self.compute.has_head_actions else refine
        tables = self.candidates(costs, blocking=blocking, is_slow=lambda: any(least[:2]))
        for table in tables:
            timed = divided(with_exchange(table, self.schedule) if is_timed_whole else table)
            slowdown = replay_makespans(timed, all_costs, blocking=blocking) / asynchronous
            at_any, expected = np.split(slowdown, [len(evaluated)])
            is_good_anywhere = bool((at_any <= limits).all())
            if blocking:
                slowest = float(expected[0])
                is_slow = (slowest > FAST_IF_BLOCKING,)
            else:
                slowest = float(expected[1])
                is_slow = (bool(expected[0] > FAST[0]), bool((expected > FAST).any()))
            is_small = timed.num_traced_actions <= MAX_TRACED_ACTIONS
            sent = timed.sent_over_asked
            if not any(is_slow) and (is_good_anywhere or blocking) and is_small and sent <= FEW_SENT:
                best = table, timed
                break
            # A hundredth is within the error of the clock: of candidates that near the smaller program wins.
            speed = round(slowest, 2) if any(is_slow) else not is_good_anywhere
            key = (*is_slow, speed, not is_small, max(sent, FEW_SENT))
            # The inbox last, which takes longest to count.
            if best is None or key < least or (key == least and num_inbox(timed) < num_inbox(best[1])):
                best = (table, timed)
                least = key
        assert best is not None
        table, timed = best
        if hidden is None:
            return timed if is_timed_whole else divided(with_exchange(table, self.schedule))
        # What hangs on layers changes no round, so that it is left out of the choice, and of what limits count; where
        # it travels twice as many kinds of action may be traced, so that fewer messages are sent in vain.
        table = hidden(with_exchange(table, self.schedule))
        return refine(table, max_traced_actions=2 * timed.num_traced_actions) if divided is refine else divided(table)

    def candidates(
        self, costs: Costs, *, blocking: bool = False, is_slow: Callable[[], bool] = lambda: True
    ) -> Iterator[RoundTable]:
        """Tables to choose from, the smallest programs first; those fitted to `costs` last.

        `is_slow` says whether all tables so far are.

        Rounds that follow time come first if paired devices meet; periodic ones before others, as they need the fewest
        pairs. Where permutes block, there is one way.
        """
        if self.compute.has_head_actions:
            for met in self._met_rounds(costs.in_forwards()):
                yield self.fold(met.rounds, num_positions=met.num_positions, send_round=met.send_round, meets=met.meets)
            return
        if blocking:
            step = blocked_step(self.compute, costs)
            if not self.schedule.parks_with_partner:
                rounds, send_round, round_type, _ = step.in_rounds()
                choices = self.parking.choices(rounds, round_type, period=len(round_type))
                yield most_parked(self._table(rounds, send_round, types, *pages) for types, pages in choices)
                return

            def blocked_table(moves: PageMoves) -> RoundTable:
                rounds, send_round, round_type, moves = step.in_rounds(moves)
                return self._table(rounds, send_round, round_type, ParkedPages(moves))

            moves = (park_pages(*self.parking, step.places, is_open) for is_open in step.open_gaps())
            yield most_parked(map(blocked_table, moves))
            return
        for lengths in [costs.in_forwards(), None] if self.schedule.parks_with_partner else [None]:
            for period in range(1, MAX_PERIOD + 1):
                rounds = periodic_rounds(self.compute, period, lengths=lengths)
                if rounds is None:
                    continue
                yield self.fold(rounds, num_positions=period, lengths=lengths)
        if self.schedule.num_replicas > 1:
            yield self.fold(checkerboard_rounds(self.compute), num_positions=CHECKERBOARD_ROUNDS)
        yield self.fold(alternating_rounds(self.compute), num_positions=ALTERNATING_ROUNDS)
        yield self.fold(earliest_rounds(self.compute), num_positions=1)
        rounds, send_round = lockstep_rounds(self.compute, costs.in_forwards())
        yield self.fold(rounds, num_positions=LOCKSTEP_ROUNDS, send_round=send_round)
        if not self.schedule.parks_pages:
            yield from self.fitted_candidates(costs, SLACK_FRACTIONS)
            if is_slow():
                yield from self.fitted_candidates(costs, MORE_SLACK)

    def _met_rounds(self, lengths: np.ndarray) -> Iterator[MetRounds]:
        """Rounds in which all devices meet, for actions of these lengths."""
        for together in (False, True):
            yield stepped_rounds(self.compute, lengths, together=together)
        if not self.compute.has_split_backward:
            yield phased_rounds(self.compute)

    def fitted_candidates(self, costs: Costs, slack_fractions: Sequence[float]) -> Iterator[RoundTable]:
        """Tables whose rounds are fitted to `costs`, the smallest programs first."""
        timeline = simulate(self.compute, costs)
        *small, largest = coupled_bodies(self.compute)
        for body in (*small, largest):
            for fraction in slack_fractions:
                fitted = fitted_rounds(timeline, body, slack_fraction=fraction, may_wait=body is largest)
                if fitted is not None:
                    rounds, send_round = fitted
                    yield self.fold(rounds, num_positions=body.num_body_rounds, send_round=send_round)

    def fold(
        self,
        rounds: np.ndarray,
        *,
        num_positions: int,
        lengths: np.ndarray | None = None,
        send_round: np.ndarray | None = None,
        meets: np.ndarray | None = None,
    ) -> RoundTable:
        """The table in which rounds of the same position, the remainder by `num_positions`, have one type.

        Args:
            rounds: [A] rounds of the compute actions.
            num_positions: rounds after which types repeat.
            lengths: [kinds] lengths of actions, if `rounds` follow time.
            send_round: [A] rounds of the messages; by default those after `rounds`.
            meets: [R] rounds in which all devices may meet, of a schedule with S and T; by default all.
        """
        send_round = rounds + 1 if send_round is None else send_round
        senders, _ = dependencies(self.compute).messages_between(self.compute.columns.device)
        num_rounds = int(max(rounds.max(), send_round[senders].max(initial=0))) + 1
        head: SplitHead | None = None
        if self.compute.has_head_actions:
            # Rows of the embedding are looked up before the first action; what the last one leaves is added after it.
            rounds = rounds + num_positions
            send_round = send_round + num_positions
            stop = num_rounds + num_positions
            # One body of rounds more in front, in whose first round rows are looked up.
            meets = np.ones(stop + 1, bool) if meets is None else np.append(np.arange(num_positions) == 0, meets)
            num_rounds = stop + int(meets[stop:].argmax()) + 1
            head = plan_collectives(self.compute, rounds, meets[:num_rounds])
        round_type = np.arange(num_rounds) % num_positions
        if head:  # a type with collectives runs them in all of its rounds
            round_type += num_positions * head.meets
            _, round_type = np.unique(round_type, return_inverse=True)
        choices = self.parking.choices(rounds, round_type, period=num_positions, lengths=lengths)
        collectives = (head,) if head else ()
        return most_parked(self._table(rounds, send_round, types, *pages, *collectives) for types, pages in choices)

    def _table(
        self, rounds: np.ndarray, send_round: np.ndarray, round_type: np.ndarray, *traffic: Transfer[RoundTable]
    ) -> RoundTable:
        fields = self.compute, self.layers_per_stage, rounds, send_round, round_type, traffic_of(self.compute, *traffic)
        return RoundTable(*fields, recomputed=self.recomputed)
