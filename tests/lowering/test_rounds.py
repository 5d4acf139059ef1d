"""Periodic, checkerboard and lockstep rounds.

Periodic rounds repeat row by row: forwards and backwards in turn, of whatever stage.
"""

from itertools import pairwise, product

import numpy as np
import pytest
from interpreter import interpret
from user_schedules import random_schedule

from jaxpipe.lowering import RoundTable, lower
from jaxpipe.lowering.lower import Folding, with_exchange
from jaxpipe.lowering.pairs import compute_schedule
from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.lowering.rounds import LOCKSTEP_ROUNDS, checkerboard_rounds, lockstep_rounds, periodic_rounds
from jaxpipe.schedules import (
    Costs,
    Kind,
    Schedule,
    bidirectional,
    build,
    linear,
    looped,
    parse_action,
    simulate,
    zig_zag,
)


@pytest.mark.parametrize(("num_devices", "num_chunks"), [(2, 2), (3, 2), (4, 3), (8, 2), (8, 4)])
def test_interleaved_has_the_period_two(num_devices, num_chunks):
    """Every device does a forward each two rounds, and a backward likewise.

    A microbatch is at stage s at the earliest 2s rounds after stage 0: device d starts in round 2d.
    """
    for num_groups in (1, 2, 5):
        schedule = build(
            "interleaved_1f1b",
            num_devices=num_devices,
            num_microbatches=num_groups * num_devices,
            num_chunks=num_chunks,
        )
        rounds, columns = periodic_rounds(schedule, 2), schedule.columns
        assert rounds is not None
        for device, kind in product(range(num_devices), (Kind.F, Kind.B)):
            own = rounds[(columns.device == device) & (columns.kind == kind)]
            np.testing.assert_array_equal(np.diff(own), 2)
            if kind is Kind.F:
                assert own[0] == 2 * device
        table = lower(schedule)
        np.testing.assert_array_equal(table.rounds, rounds)


def test_periods_below_that_of_the_row_do_not_exist():
    # A forward and a backward do not fit into one round.
    assert periodic_rounds(build("1f1b", num_devices=4, num_microbatches=8), 1) is None
    assert periodic_rounds(build("interleaved_1f1b", num_devices=4, num_microbatches=8), 1) is None
    # 1F1B waits for D-1 messages there and D-1 back while D microbatches are on their way: four rounds, not three.
    assert periodic_rounds(build("1f1b", num_devices=8, num_microbatches=32), 3) is None
    assert periodic_rounds(build("1f1b", num_devices=8, num_microbatches=32), 4) is not None


# ---- Checkerboard: Chimera and BitPipe stand in the slots of their closed form, one permute between two slots ----

CASES = [
    ("chimera", {}, 1),
    *(("bitpipe", {"num_chunks": num_chunks}, num_chunks) for num_chunks in (1, 2, 3, 4)),
    *(("bitpipe", {"num_chunks": num_chunks, "v_shape": False}, num_chunks) for num_chunks in (2, 3)),
]


def slots(schedule: Schedule, num_chunks: int) -> list[int]:
    """[A] 2i + kD + q in the order of the columns: i in its direction of its unit, kD + q steps from the chain's start.

    A unit of D microbatches, half of them down and half up, starts 2vD slots after the one before.
    """
    num_devices, num_stages = schedule.num_devices, schedule.num_stages
    result = []
    for row in schedule.rows:
        for kind, stage, microbatch, *_ in row:
            unit, within = divmod(microbatch, num_devices)
            steps = stage if kind is Kind.F else 2 * num_stages - 1 - stage
            result.append(2 * (within % (num_devices // 2)) + steps + 2 * num_chunks * num_devices * unit)
    return result


@pytest.mark.parametrize(("name", "options", "num_chunks"), CASES, ids=str)
def test_rounds_are_the_slots_of_the_closed_form(name, options, num_chunks):
    # Two devices have one link, of which a loop would have to make two.
    at_least = 2 if options.get("v_shape", True) else 4
    for num_devices, num_units in product(range(at_least, 17, 2), (1, 2, 5)):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_units * num_devices, **options)
        steps = compute_schedule(schedule)
        expected = np.array(slots(steps, num_chunks))
        np.testing.assert_array_equal(checkerboard_rounds(steps), 2 * expected)


@pytest.mark.parametrize("num_devices", [6, 8, 16])
@pytest.mark.parametrize(("name", "options", "num_chunks"), CASES, ids=str)
def test_in_each_round_of_messages_a_device_meets_one_neighbour(name, options, num_chunks, num_devices):
    schedule = build(name, num_devices=num_devices, num_microbatches=3 * num_devices, **options)
    rounds = checkerboard_rounds(compute_schedule(schedule))
    table = Folding(schedule, (1,) * schedule.num_stages).fold(rounds, num_positions=4)
    assert lower(schedule).rounds.tolist() == table.rounds.tolist()
    line = [frozenset(link) for link in pairwise(range(num_devices))]
    around = [frozenset({num_devices - 1, 0})] if not options.get("v_shape", True) else []
    for position, links in ((1, line[::2]), (3, [*line[1::2], *around])):
        assert (table.kinds[position - 1], table.permutes["messages"][position - 1]) == ({Kind.F, Kind.B}, ())
        assert not table.kinds[position]
        (pairs,) = table.permutes["messages"][position]
        assert set(map(frozenset, pairs)) == set(links)
        assert all(sum(device in link for link in links) <= 1 for device in range(num_devices))


# ---- Lockstep: whatever the order, rounds by the time of the asynchronous clock cost no time ----

PLACEMENTS = {
    "linear": linear(5),
    "looped": looped(4, 2),
    "V": zig_zag(4, 2),
    "W": zig_zag(3, 4),
    "two lines": bidirectional(linear(6)),
    "two Vs": bidirectional(zig_zag(4, 2)),
}


def lockstep(schedule: Schedule, costs: Costs) -> RoundTable:
    steps = compute_schedule(schedule)
    rounds, send_round = lockstep_rounds(steps, costs.in_forwards())
    problem = Folding(schedule, (1,) * schedule.num_stages)
    return problem.fold(rounds, num_positions=LOCKSTEP_ROUNDS, send_round=send_round)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_any_order_is_as_fast_as_on_the_asynchronous_clock(placement, seed):
    schedule = random_schedule(placement, num_microbatches=3 + seed, seed=seed)
    for backward in (1.0, 2.0):
        costs = Costs(backward=backward)
        assert replay_makespans(lockstep(schedule, costs), [costs])[0] == simulate(schedule, costs).makespan


def test_so_it_is_of_backwards_in_two_parts():
    rows = ("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    schedule = Schedule("split", linear(2), 2, actions)
    table = lockstep(schedule, Costs())
    assert replay_makespans(table, [Costs()])[0] == simulate(schedule, Costs()).makespan


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_messages_travel_between_forwards_alone(placement):
    schedule = random_schedule(placement, num_microbatches=6, seed=1)
    for costs in (Costs(backward=1.0), Costs(backward=2.0), Costs(backward=3.0)):
        table = lockstep(schedule, costs)
        meeting, working = table.permutes["messages"]
        assert meeting
        assert not working
        assert (table.send_round % LOCKSTEP_ROUNDS == 0).all()
        interpret(with_exchange(table, schedule))


def test_other_costs_than_expected_take_time():
    """Where it matters what is expected, the equality above can fail."""
    schedule = build("hanayo", num_devices=4, num_microbatches=16)
    table = lockstep(schedule, Costs(backward=2.0))
    costs = Costs(backward=1.0)
    assert replay_makespans(table, [costs])[0] > 1.05 * simulate(schedule, costs).makespan
