"""Transfers on the asynchronous clock, and what devices store meanwhile, against timelines worked out by hand."""

from fractions import Fraction

import numpy as np
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    Action,
    Costs,
    Kind,
    Schedule,
    build,
    check,
    linear,
    parse_action,
    peak_activations,
    simulate,
    stored,
    transfers,
    violations,
)

ONE_MOVES = ("0F0 0EVICT0 0F1 0LOAD0 0B0 0B1", "1F0 1B0 1F1 1B1")


def schedule_of(*rows: str, num_microbatches: int, parked: tuple[Fraction, ...] = ()) -> Schedule:
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return check(Schedule("by hand", linear(len(rows)), num_microbatches, actions, parked))


def start_of(schedule: Schedule, costs: Costs) -> dict[str, float]:
    timeline = simulate(schedule, costs)
    labels = [str(action) for row in schedule.rows for action in row]
    return dict(zip(labels, timeline.start.tolist(), strict=True))


def steps(device) -> list[tuple[float, ...]]:
    return list(
        zip(*(values.tolist() for values in (device.time, device.own, device.parked, device.in_transit)), strict=True)
    )


def test_transfers_run_beside_computation():
    schedule = schedule_of(*ONE_MOVES, num_microbatches=2, parked=(Fraction(1, 2), Fraction(1)))
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0, transfer=0.5, slot_messages=3.0))
    # half a slot takes 0.5 x 3 / 2 = 0.75; 1F0 at 1.5, 1B0 at 2.5, its message at 5, 1B1 ends at 7.5
    assert timeline.start.tolist() == [0.0, 1.0, 1.0, 2.0, 5.0, 8.0, 1.5, 2.5, 4.5, 5.5]
    assert timeline.end.tolist() == [1.0, 1.75, 2.0, 2.75, 7.0, 10.0, 2.5, 4.5, 5.5, 7.5]
    assert timeline.bubble_ratio == pytest.approx(1 - 6 / 10)  # transfers are no work


def test_a_backward_waits_for_its_load_and_a_load_for_its_eviction():
    schedule = schedule_of(*ONE_MOVES, num_microbatches=2)
    start = start_of(schedule, Costs(transfer=0.5, slot_messages=20.0))
    assert (start["0EVICT0"], start["0LOAD0"], start["0B0"]) == (1.0, 11.0, 21.0)
    assert (start["1F0"], start["1F1"]) == (1.5, 4.5)  # messages wait for no transfer


def test_transfers_of_a_pair_follow_each_other_in_the_order_of_issue():
    rows = ("0F0 0EVICT0 0F1 0F2 0LOAD0 0B0 0B1 0B2", "1F0 1EVICT0 1LOAD0 1B0 1F1 1B1 1F2 1B2")
    schedule = schedule_of(*rows, num_microbatches=3)
    start = start_of(schedule, Costs(transfer=0.5, slot_messages=2.0))
    # device 1 has computed 1F0 at 2.5 and issues two transfers; device 0 issues its load at 3
    assert (start["0EVICT0"], start["1EVICT0"], start["1LOAD0"], start["0LOAD0"]) == (1.0, 2.5, 3.5, 4.5)
    assert start["1B0"] == 4.5


def test_each_way_has_its_own_link():
    schedule = schedule_of(*ONE_MOVES, num_microbatches=2)
    timeline = simulate(schedule, Costs(link={(0, 1): 0.25, (1, 0): 0.5}, slot_messages=2.0))
    assert (timeline.end - timeline.start)[[1, 3]].tolist() == [0.5, 1.0]


def test_the_last_load_before_a_backward_counts():
    rows = ("0F0 0EVICT0 0LOAD0 0I0 0EVICT0 0LOAD0 0W0", "1F0 1I0 1W0")
    timeline = simulate(schedule_of(*rows, num_microbatches=1), Costs(link={(1, 0): 3.0}, slot_messages=1.0))
    # the first load to 4; 1I0 ends at 3, its message is there at 6; 0I0 to 7, the second load to 10
    assert timeline.start[:7].tolist() == [0.0, 1.0, 1.0, 6.0, 7.0, 7.0, 10.0]


def test_a_circle_is_told_by_rule_and_simulator_alike():
    rows = ("0F0 0EVICT0 0LOAD0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    schedule = Schedule("circle", linear(2), 2, actions)
    assert [violation.rule for violation in violations(schedule)] == ["acyclic"]
    with pytest.raises(ScheduleError, match="0B0, 1F1"):
        simulate(schedule)


def test_both_devices_store_what_is_in_transit():
    schedule = schedule_of(*ONE_MOVES, num_microbatches=2, parked=(Fraction(1, 2), Fraction(1)))
    home, partner = stored(simulate(schedule, Costs(transfer=0.5, slot_messages=3.0)))
    assert steps(home) == [
        (0.0, 1.0, 0.0, 0.0),  # 0F0
        (1.0, 1.5, 0.0, 0.5),  # half of 0 leaves, 0F1
        (1.75, 1.5, 0.0, 0.0),
        (2.0, 1.5, 0.0, 0.5),  # it comes back
        (2.75, 2.0, 0.0, 0.0),
        (7.0, 1.0, 0.0, 0.0),
        (10.0, 0.0, 0.0, 0.0),
    ]
    assert steps(partner) == [
        (1.0, 0.0, 0.0, 0.5),
        (1.5, 1.0, 0.0, 0.5),
        (1.75, 1.0, 0.5, 0.0),
        (2.0, 1.0, 0.0, 0.5),
        (2.75, 1.0, 0.0, 0.0),
        (4.5, 1.0, 0.0, 0.0),  # 1B0 ends, 1F1 starts
        (7.5, 0.0, 0.0, 0.0),
    ]
    assert home.total.tolist() == [1.0, 2.0, 1.5, 2.0, 2.0, 1.0, 0.0]
    assert peak_activations(schedule).tolist() == [2.0, 1.5]


def test_nothing_is_lost_on_the_way():
    for num_devices, num_microbatches, unit in ((5, 12, "page"), (8, 20, "microbatch"), (16, 33, "page")):
        balanced = build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches, unit=unit)
        plain = build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)
        pairs = [(d, num_devices - 1 - d) for d in range(num_devices) if abs(num_devices - 1 - 2 * d) > 1]
        costs = Costs(link=dict.fromkeys(pairs, 0.3), slot_messages=2.0)
        here, there = stored(simulate(balanced, costs)), stored(simulate(plain, costs))
        for device in range(num_devices):
            times = np.unique(np.concatenate([curve.time for curve in (*here, *there)]))
            pair = (device, num_devices - 1 - device)
            # what is in transit is stored twice
            live = sum(at(here[d], times, here[d].total - here[d].in_transit / 2) for d in pair)
            assert np.allclose(live, sum(at(there[d], times, there[d].total) for d in pair))


def at(device, times: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The step function `values` of `device` at `times`."""
    return np.concatenate([[0.0], values])[np.searchsorted(device.time, times, side="right")]


def test_transfers_are_counted_by_the_device_whose_they_are():
    schedule = schedule_of(*ONE_MOVES, num_microbatches=2, parked=(Fraction(1, 3), Fraction(1)))
    moved = transfers(schedule)
    assert moved.evicted.tolist() == [1 / 3, 0.0]
    assert moved.loaded.tolist() == [1 / 3, 0.0]
    twice = schedule_of("0F0 0EVICT0 0LOAD0 0EVICT0 0LOAD0 0B0", "1F0 1B0", num_microbatches=1)
    assert transfers(twice).evicted.tolist() == [2.0, 0.0]


def test_a_share_belongs_to_its_stage():
    schedule = Schedule("shares", linear(2), 1, ((Action(Kind.F, 0, 0),), ()), (Fraction(1, 2), Fraction(1)))
    assert [schedule.parked_of(stage) for stage in (0, 1)] == [Fraction(1, 2), 1]
    assert Schedule("whole", linear(2), 1, ((), ())).parked_of(1) == 1
