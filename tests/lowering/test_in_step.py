"""Rounds that go by the time of the asynchronous clock: whatever the order, no device waits for the clock of rounds."""

import pytest
from interpreter import interpret
from user_schedules import random_schedule

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.lower import Folding, compute_schedule, with_exchange
from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.lowering.rounds import LOCKSTEP_ROUNDS, in_forwards, lockstep_rounds
from jaxpipe.schedules import Costs, Schedule, bidirectional, build, linear, looped, parse_action, simulate, zig_zag

PLACEMENTS = {
    "linear": linear(5),
    "looped": looped(4, 2),
    "V": zig_zag(4, 2),
    "W": zig_zag(3, 4),
    "two lines": bidirectional(linear(6)),
    "two Vs": bidirectional(zig_zag(4, 2)),
}


def in_step(schedule: Schedule, costs: Costs) -> RoundTable:
    steps = compute_schedule(schedule)
    rounds, send_round = lockstep_rounds(steps, in_forwards(costs))
    problem = Folding(schedule, (1,) * schedule.num_stages)
    return problem.fold(rounds, num_body_rounds=LOCKSTEP_ROUNDS, send_round=send_round)


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_any_order_is_as_fast_as_on_the_asynchronous_clock(placement, seed):
    schedule = random_schedule(placement, num_microbatches=3 + seed, seed=seed)
    for backward in (1.0, 2.0):
        costs = Costs(backward=backward)
        assert replay_makespans(in_step(schedule, costs), [costs])[0] == simulate(schedule, costs).makespan


def test_so_it_is_of_backwards_in_two_parts():
    rows = ("0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    schedule = Schedule("split", linear(2), 2, actions)
    table = in_step(schedule, Costs())
    assert replay_makespans(table, [Costs()])[0] == simulate(schedule, Costs()).makespan


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_messages_travel_between_forwards_alone(placement):
    schedule = random_schedule(placement, num_microbatches=6, seed=1)
    for costs in (Costs(backward=1.0), Costs(backward=2.0), Costs(backward=3.0)):
        table = in_step(schedule, costs)
        meeting, working = table.permutes
        assert meeting
        assert not working
        assert (table.send_round % LOCKSTEP_ROUNDS == 0).all()
        interpret(with_exchange(table, schedule))


def test_other_costs_than_expected_take_time():
    """Where it matters what is expected, the equality above can fail."""
    schedule = build("hanayo", num_devices=4, num_microbatches=16)
    table = in_step(schedule, Costs(backward=2.0))
    costs = Costs(backward=1.0)
    assert replay_makespans(table, [costs])[0] > 1.05 * simulate(schedule, costs).makespan
