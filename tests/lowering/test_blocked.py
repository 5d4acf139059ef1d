"""Devices whose permutes hold both up: their rounds do what the rows say, and those of two are the shortest."""

import functools

import numpy as np
import pytest
from interpreter import interpret
from tiers import tiers
from user_schedules import PLACEMENTS, random_schedule

from jaxpipe.lowering import lower
from jaxpipe.lowering.blocked import MOST_UNSENT
from jaxpipe.lowering.replay import replay
from jaxpipe.lowering.transfers.messages import NOTHING
from jaxpipe.schedules import REGISTRY, Costs, Schedule, build, simulate
from jaxpipe.schedules.analysis.dependencies import dependencies

FEW = ("1f1b", "bitpipe", "zb_v")
OF_TWO = {name: placement for name, placement in PLACEMENTS.items() if placement.num_devices == 2}
COSTS = [
    Costs(gradient_messages=0.0),
    Costs(backward=2.0, input_gradient=1.2, weight_gradient=0.8, gradient_messages=0.0),
    Costs(backward=2.0, input_gradient=0.8, weight_gradient=1.2, gradient_messages=0.0),
]


def least_time(schedule: Schedule, costs: Costs) -> float:
    """Least time of a step in which devices exchange whatever they have whenever they meet, tried out whole."""
    columns, message = schedule.columns, dependencies(schedule).message
    duration = costs.of_kind(schedule.num_stages)[columns.kind, columns.stage]
    rows = [np.flatnonzero(columns.device == device).tolist() for device in range(2)]

    def can_follow(action: int, done: tuple[int, int]) -> bool:
        sender = message[action]
        other = 1 - columns.device[action]
        return sender < 0 or columns.device[sender] != other or columns.position[sender] < done[other]

    @functools.cache
    def left(done: tuple[int, int]) -> float:
        parts = []
        for device, at in enumerate(done):
            found, num_sends = [(at, 0.0)], 0
            for position in range(at, len(rows[device])):
                action = rows[device][position]
                is_read = bool((columns.device[message == action] != device).any())
                if not can_follow(action, done) or (is_read and num_sends == MOST_UNSENT):
                    break
                num_sends += is_read
                found.append((position + 1, found[-1][1] + duration[action]))
            parts.append(found)
        if all(at == len(row) for at, row in zip(done, rows, strict=True)):
            return 0.0
        return min(
            (max(s, t) + left((i, j)) for i, s in parts[0] for j, t in parts[1] if (i, j) != done), default=np.inf
        )

    return left((0, 0))


@pytest.mark.parametrize("placement", OF_TWO.values(), ids=OF_TWO)
@pytest.mark.parametrize("seed", range(3))
def test_no_rounds_are_shorter(placement, seed):
    schedule = random_schedule(placement, num_microbatches=2 + seed, seed=seed, split_fraction=seed / 2)
    for costs in COSTS:
        table = lower(schedule, costs=costs, blocking=True)
        interpret(table)
        assert replay(table, costs, blocking=True).makespan == pytest.approx(least_time(schedule, costs))


@pytest.mark.parametrize(
    "name", tiers(FEW, ci=[name for name in sorted(REGISTRY) if REGISTRY[name].takes(2) and name not in FEW])
)
def test_a_step_is_little_longer_than_on_the_asynchronous_clock(name):
    for num_microbatches in (2, 5, 8):
        schedule = build(name, num_devices=2, num_microbatches=num_microbatches)
        if schedule.delays:
            continue
        for costs in COSTS:
            table = lower(schedule, costs=costs, blocking=True)
            interpret(table)
            assert replay(table, costs, blocking=True).makespan <= 1.05 * simulate(table.schedule, costs).makespan
            if schedule.num_replicas == 1:
                assert table.num_traced_actions <= 4


@pytest.mark.parametrize("name", ["mixpipe", "hanayo"])
def test_a_message_waits_while_its_device_computes_on(name):
    table = lower(build(name, num_devices=4, num_microbatches=16), blocking=True)
    assert (table.grids["messages"].next_out != NOTHING).any()
    interpret(table)


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(4, 9), (8, 16)])
def test_pages_travel_when_neither_device_waits(num_devices, num_microbatches, backward):
    costs = Costs(backward=backward)
    schedule = build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches)
    table, beside_actions = (lower(schedule, costs=costs, blocking=blocking) for blocking in (True, False))
    interpret(table)
    assert len(table.page_moves.layer) == len(beside_actions.page_moves.layer) > 0
    assert table.num_slots <= beside_actions.num_slots
    assert replay(table, costs, blocking=True).makespan == pytest.approx(simulate(table.schedule, costs).makespan)


def test_where_devices_are_never_between_actions_at_once_they_wait_for_pages():
    costs = Costs(forward=[1.0, 1.1, 0.95, 1.07], backward=[2.3, 2.0, 2.15, 1.9])
    schedule = build("bpipe", num_devices=4, num_microbatches=16)
    table = lower(schedule, costs=costs, blocking=True)
    interpret(table)
    assert len(table.page_moves.layer) == len(lower(schedule).page_moves.layer)
    assert replay(table, costs, blocking=True).makespan <= 1.01 * simulate(table.schedule, costs).makespan
