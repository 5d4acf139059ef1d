"""Gradients of two holders of a stage: each layer reaches the owner once and complete, in as few lanes as can be."""

from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from interpreter import interpret
from legal_devices import TWO_REPLICAS, variants
from tiers import tiers
from user_schedules import TWO_WAYS, random_schedule

from jaxpipe.lowering import IDLE, RoundTable, lower
from jaxpipe.lowering.permutes import in_lanes
from jaxpipe.lowering.transfers.replica_gradients import ReplicaGradients
from jaxpipe.schedules import Kind, Schedule, build

VARIANTS = [variant for variant in variants(2, 6) if variant[0] in TWO_REPLICAS]


def lowered(schedule: Schedule, num_layers: int = 2) -> RoundTable:
    return lower(schedule, layers_per_stage=(num_layers,) * schedule.num_stages)


def complete(schedule: Schedule, table: RoundTable) -> dict[int, int]:
    """Stage -> the round at whose end both holders have come to its SYNC, or to the end of the step; off the rows."""
    rounds = iter(table.rounds.tolist())
    result: dict[int, int] = {}
    for row in schedule.rows:
        now = -1
        for action in row:
            if action.kind is Kind.SYNC:
                result[action.stage] = max(result.get(action.stage, -1), now)
            else:
                now = next(rounds)
    return result or dict.fromkeys(range(schedule.num_stages), int(table.rounds.max()))


def assert_planned(schedule: Schedule, table: RoundTable) -> None:
    exchange, placement = table.transfers["replica_gradients"], schedule.placement
    moves = exchange.sends
    sent = []
    for round_, source, target, given, received, layer in zip(
        moves.round, moves.source, moves.target, exchange.send_chunk, exchange.recv_chunk, exchange.layer, strict=True
    ):
        (replica, stage), owned = placement.stages_of[source][given], placement.stages_of[target][received]
        assert (replica, owned) == (1, (0, stage))
        assert target == schedule.num_devices - 1 - source
        assert round_ > complete(schedule, table)[stage]
        sent.append((stage, layer))
    assert sorted(sent) == [(stage, i) for stage, num in enumerate(table.layers_per_stage) for i in range(num)]
    start = tail_start(table)
    assert (moves.round > start).all()
    assert not any(
        table.permutes_of("replica_gradients")[round_type] for round_type in np.unique(table.round_type[:start])
    )


def tail_start(table: RoundTable) -> int:
    """The round after the last forward."""
    return int(table.rounds[table.schedule.columns.is_kind(Kind.F)].max()) + 1


@pytest.mark.parametrize(
    "variant", tiers(VARIANTS[::3], slow=[each for i, each in enumerate(VARIANTS) if i % 3]), ids=str
)
def test_gradients_travel_in_the_tail_once_both_holders_have_them(variant):
    name, options, num_devices = variant
    for num_microbatches in (1, num_devices, 2 * num_devices + 1):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
        assert_planned(schedule, lowered(schedule))


@pytest.mark.parametrize("has_syncs", [True, False])
@pytest.mark.parametrize("placement", TWO_WAYS.values(), ids=TWO_WAYS)
def test_so_they_do_in_user_schedules(placement, has_syncs):
    for seed in range(3):
        schedule = random_schedule(placement, num_microbatches=2 + 2 * seed, seed=seed, has_syncs=has_syncs)
        assert_planned(schedule, lowered(schedule))


def test_one_replica_exchanges_nothing():
    for name in ("1f1b", "bpipe", "interleaved_1f1b"):
        table = lower(build(name, num_devices=4, num_microbatches=8))
        assert "replica_gradients" not in table.transfers
        assert table.num_lanes("replica_gradients") == 0


@pytest.mark.parametrize(("name", "num_devices"), [("chimera", 8), ("bitpipe", 4), ("bitpipe", 8), ("mixpipe", 8)])
def test_an_eager_exchange_begins_before_the_last_action_and_a_lazy_one_after_its_pair(name, num_devices):
    for num_microbatches in (num_devices, 3 * num_devices):
        sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches}
        eager, lazy = (lowered(build(name, eager_sync=eager_sync, **sizes)) for eager_sync in (True, False))
        moves = eager.transfers["replica_gradients"].sends
        assert moves.round.min() < eager.rounds.max()
        assert (moves.round < last_action(eager)[[moves.source, moves.target]]).any()
        moves = lazy.transfers["replica_gradients"].sends
        assert (moves.round > last_action(lazy)[[moves.source, moves.target]]).all()


def last_action(table: RoundTable) -> np.ndarray:
    """[device] the round of its last action."""
    return np.where(table.kind == IDLE, -1, np.arange(table.num_rounds)[:, None]).max(axis=0)


def most_hidden(complete_in: list[int], rounds: list[int], num_lanes: int) -> int:
    """The most layers of one device that can travel in `rounds`, each after it is complete; a matching, by search."""
    places = [r for r in rounds for _ in range(num_lanes)]
    taken: dict[int, int] = {}

    def settle(layer: int, seen: set[int]) -> bool:
        for place, r in enumerate(places):
            if r > complete_in[layer] and place not in seen:
                seen.add(place)
                if place not in taken or settle(taken[place], seen):
                    taken[place] = layer
                    return True
        return False

    return sum(settle(layer, set()) for layer in range(len(complete_in)))


def left_over(schedule: Schedule, table: RoundTable, num_lanes: int, start: int) -> list[int]:
    """[device] the fewest layers that travel behind no action, if the tail begins in round `start`."""
    rounds = [r for r in np.unique(table.rounds).tolist() if r > start]
    when = complete(schedule, table)
    owed = [
        [when[stage] for replica, stage in held if replica for _ in range(table.layers_per_stage[stage])]
        for held in schedule.placement.stages_of
    ]
    return [len(layers) - most_hidden(layers, rounds, num_lanes) for layers in owed]


@pytest.mark.parametrize(
    "variant", tiers(VARIANTS[::3], slow=[each for i, each in enumerate(VARIANTS) if i % 3]), ids=str
)
def test_lanes_are_as_few_as_leave_nothing_over_that_could_be_hidden(variant):
    name, options, num_devices = variant
    for num_layers in (1, 3, 5):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_devices, **options)
        table = lowered(schedule, num_layers)
        start, any_number = tail_start(table), num_layers * schedule.num_stages
        least = max(left_over(schedule, table, any_number, start))
        lanes = next(lanes for lanes in count(1) if max(left_over(schedule, table, lanes, start)) == least)
        assert table.num_lanes("replica_gradients") == lanes


def test_several_lanes_are_among_these():
    assert lowered(build("bitpipe", num_devices=4, num_microbatches=4), 8).num_lanes("replica_gradients") > 1


def with_moves(table: RoundTable, rounds: np.ndarray, chosen: np.ndarray) -> RoundTable:
    """`table` with the chosen layers of its exchange, in `rounds`; lanes anew."""
    exchange = table.transfers["replica_gradients"]
    travels = in_lanes(rounds, exchange.sends.source[chosen], exchange.sends.target[chosen])
    changed = ReplicaGradients(
        travels, exchange.send_chunk[chosen], exchange.recv_chunk[chosen], exchange.layer[chosen]
    )
    traffic = tuple(changed if transfer is exchange else transfer for transfer in table.kinds_of_traffic)
    return replace(table, kinds_of_traffic=traffic)


@pytest.mark.parametrize("eager_sync", [True, False])
def test_the_interpreter_sees_layers_that_are_lost_doubled_or_sent_too_early(eager_sync):
    schedule = build("bitpipe", num_devices=4, num_microbatches=6, eager_sync=eager_sync)
    table = lowered(schedule)
    exchange, when = table.transfers["replica_gradients"], complete(schedule, table)
    rounds = exchange.sends.round
    every = np.arange(len(rounds))
    interpret(with_moves(table, rounds, every))
    for i in every.tolist():
        source = exchange.sends.source[i]
        stage = schedule.placement.stages_of[source][exchange.send_chunk[i]][1]
        columns = table.schedule.columns
        adds = columns.is_kind(Kind.B) & (columns.stage == stage) & (columns.device == source)
        lost = with_moves(table, np.delete(rounds, i), np.delete(every, i))
        twice = with_moves(table, np.append(rounds, rounds[i]), np.append(every, i))
        early = rounds.copy()
        early[i] = table.rounds[adds].max()  # read at the end of the round before its last backward
        assert early[i] <= when[stage] < rounds[i]
        for spoiled in (lost, twice, with_moves(table, early, every)):
            with pytest.raises(AssertionError):
                interpret(spoiled)


# ---- Gradients are sent once they are summed over the copies of the pipeline, not before ----


@pytest.mark.parametrize("eager_sync", [True, False])
@pytest.mark.parametrize("name", TWO_REPLICAS)
def test_a_layer_is_read_after_its_sum(name, eager_sync):
    schedule = build(name, num_devices=4, num_microbatches=8, eager_sync=eager_sync)
    table = lower(schedule, layers_per_stage=(2,) * schedule.num_stages)
    exchange = table.transfers["replica_gradients"]
    summed = {
        (device, int(table.chunk[r, device])): r + 1 for r, device in np.argwhere(table.completes).tolist()
    }  # (device, chunk) -> round
    assert len(exchange.sends.round) == 2 * schedule.num_stages
    for sent, source, target, given, received in zip(
        exchange.sends.round,
        exchange.sends.source,
        exchange.sends.target,
        exchange.send_chunk,
        exchange.recv_chunk,
        strict=True,
    ):
        assert sent - 1 >= summed[int(source), int(given)]  # read at the end of the round before it travels
        assert sent >= summed[int(target), int(received)]  # added at the end of the round in which it travels
