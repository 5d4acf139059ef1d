"""Parked pages: bound, traffic and time of BPipe's rolled table, transit included."""

from itertools import product
from math import ceil

import numpy as np
import pytest
from interpreter import interpret

from jaxpipe.lowering import RoundTable, lower, replay
from jaxpipe.lowering.lower import Folding
from jaxpipe.lowering.pairs import compute_schedule
from jaxpipe.lowering.round_types import MAX_TYPES
from jaxpipe.lowering.rounds import periodic_rounds
from jaxpipe.schedules import Costs, build, simulate

GRID = [*product((4, 5, 6, 7, 8), range(1, 26)), *product((9, 16), (1, 8, 15, 16, 17, 33, 65)), (33, 64)]
MORE = [
    *(pytest.param(*sizes, marks=pytest.mark.ci) for sizes in ((4, 16), (5, 16))),
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((8, 32), (16, 40))),
]
WIDE = [*product((9, 16, 33, 64), (1, 8, 15, 16, 17, 33, 65, 128))]


def bpipe(num_devices: int, num_microbatches: int, **options):
    return build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches, **options)


def bound(num_devices: int) -> int:
    """Of slots on any device: Obscura (USENIX ATC 2025), section 9.3, of BPipe."""
    return ceil((num_devices + 2) / 2)


def asked_slots(table: RoundTable) -> np.ndarray:
    """[device] slots that leave it in a step."""
    layers = np.array(table.layers_per_stage)[table.schedule.columns.stage[table.page_moves.backward]]
    return np.bincount(table.page_moves.home, 1 / layers, minlength=table.schedule.num_devices)


def assert_within_the_bound(num_devices: int, num_microbatches: int, num_layers: int) -> None:
    table = lower(bpipe(num_devices, num_microbatches), layers_per_stage=(num_layers,) * num_devices)
    assert table.num_slots <= bound(num_devices), (num_devices, num_microbatches)
    assert table.pages.num_pages <= bound(num_devices) * num_layers


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 3, 8])
def test_no_device_holds_more_than_the_bound_in_transit_included(num_layers):
    for num_devices, num_microbatches in GRID:
        assert_within_the_bound(num_devices, num_microbatches, num_layers)


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [1, 3, 8])
def test_none_of_many_devices_does(num_layers):
    for num_devices, num_microbatches in WIDE:
        assert_within_the_bound(num_devices, num_microbatches, num_layers)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(4, 9), (8, 7), *MORE])
def test_the_bound_holds_for_backwards_of_three_forwards_too(num_devices, num_microbatches):
    schedule, costs = bpipe(num_devices, num_microbatches), Costs(backward=3.0)
    for num_layers in (1, 2, 3, 8, 10):
        table = lower(schedule, layers_per_stage=(num_layers,) * num_devices, costs=costs)
        assert table.num_slots <= bound(num_devices)


@pytest.mark.parametrize("num_devices", [4, 8, 9, pytest.param(16, marks=pytest.mark.ci)])
def test_with_enough_microbatches_the_bound_is_reached(num_devices):
    table = lower(bpipe(num_devices, 3 * num_devices), layers_per_stage=(4,) * num_devices)
    assert table.num_slots == bound(num_devices)


@pytest.mark.parametrize("unit", ["page", "microbatch"])
@pytest.mark.parametrize("rolled", [True, False])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(4, 3), (5, 9), (8, 7), *MORE])
def test_pages_are_where_they_are_looked_for(num_devices, num_microbatches, rolled, unit):
    uneven = tuple(1 + (2 * stage + 1) % 3 for stage in range(num_devices))
    for layers_per_stage in ((1,) * num_devices, uneven, (8,) * num_devices):  # eight: several lanes
        schedule = bpipe(num_devices, num_microbatches, unit=unit)
        table = lower(schedule, layers_per_stage=layers_per_stage, rolled=rolled)
        interpret(table)
        assert len(table.page_moves.layer) or num_microbatches <= bound(num_devices)


@pytest.mark.parametrize("backward", [1.0, 2.0, 3.0])
@pytest.mark.parametrize(
    "num_devices",
    [pytest.param(each, marks=pytest.mark.slow if each == 32 else pytest.mark.ci) for each in (4, 5, 8, 16, 32)],
)
def test_it_takes_no_more_time_than_1f1b(num_devices, backward):
    costs = Costs(backward=backward)
    for num_microbatches in (num_devices - 1, 2 * num_devices, 4 * num_devices + 1):
        table = lower(bpipe(num_devices, num_microbatches), layers_per_stage=(8,) * num_devices, costs=costs)
        plain = build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)
        assert replay(table, costs).makespan <= 1.001 * simulate(plain, costs).makespan


@pytest.mark.ci
@pytest.mark.parametrize("num_devices", [4, 8, 16])
def test_a_tenth_off_the_expected_backward_costs_little(num_devices):
    table = lower(bpipe(num_devices, 4 * num_devices))
    plain = build("1f1b", num_devices=num_devices, num_microbatches=4 * num_devices)
    for backward in (1.8, 2.2):
        costs = Costs(backward=backward)
        assert replay(table, costs).makespan <= 1.05 * simulate(plain, costs).makespan


@pytest.mark.parametrize(("num_devices", "num_layers", "most"), [(4, 1, 1.005), (8, 3, 1.04)])
def test_pages_travel_where_both_devices_of_a_pair_compute(num_devices, num_layers, most):
    """A page takes 0.34 forwards of its layer; where one of the two is about to begin an action it would wait for it.

    If only the partner's next action counts, the second step is 1.049 times as long.
    """
    costs = Costs(transfer=0.02 / num_layers, slot_messages=17.0 * num_layers)
    schedule = bpipe(num_devices, 4 * num_devices)
    table = lower(schedule, layers_per_stage=(num_layers,) * num_devices)
    assert replay(table, costs).makespan <= most * simulate(schedule, costs).makespan


def test_rounds_that_keep_no_step_with_time_cost_a_lot():
    """In 1F1B's own four rounds the two of a pair wait for each other: the check above can fail."""
    schedule = bpipe(8, 32)
    steps = compute_schedule(schedule)
    rounds = periodic_rounds(steps, 4)
    assert rounds is not None
    table = Folding(schedule, (8,) * 8).fold(rounds, num_positions=4)
    assert replay(table).makespan / simulate(steps).makespan > 1.2


def test_traffic():
    # `balance`: by pages 32 f = 16, 12.8, 8 slots; evict-latest, the least with all overlapped is 15, 12, 8.
    by_pages = asked_slots(lower(bpipe(8, 32), layers_per_stage=(8,) * 8))
    assert (by_pages <= [16, 13, 8, 0, 0, 0, 0, 0]).all()
    by_microbatches = asked_slots(lower(bpipe(8, 32, unit="microbatch"), layers_per_stage=(8,) * 8))
    assert (by_microbatches <= [15, 12, 8, 0, 0, 0, 0, 0]).all()
    assert by_pages[0] > 8
    assert by_microbatches[0] > 8


@pytest.mark.parametrize("num_layers", [1, 4, 8, 10])
@pytest.mark.parametrize("num_devices", [4, 8, pytest.param(16, marks=pytest.mark.ci)])
def test_transfers_hide_behind_actions_and_are_few(num_devices, num_layers):
    table = lower(bpipe(num_devices, 4 * num_devices), layers_per_stage=(num_layers,) * num_devices)
    assert any(table.permutes_of("parked_pages"))
    # At the end of the step a page may travel in a round in which no device computes any more.
    exposed = ~np.isin(table.transfers["parked_pages"].sends.round, table.rounds)
    assert exposed.sum() <= 0.02 * len(exposed) + 2
    for permutes, lanes in zip(table.permutes["messages"], table.permutes_of("parked_pages"), strict=True):
        assert len(permutes) + len(lanes) <= 4
        assert all(source + target == num_devices - 1 for pairs in lanes for source, target in pairs)
    # A microbatch parks at most half its pages, in three rounds of its period.
    assert table.num_lanes("parked_pages") == ceil(ceil(num_layers / 2) / 3)


def test_the_body_does_not_grow_with_microbatches():
    few, many = (lower(bpipe(8, n), layers_per_stage=(8,) * 8) for n in (16, 256))
    assert max(few.num_types, many.num_types) <= MAX_TYPES
    assert many.num_traced_actions <= few.num_traced_actions
    assert few.pages.num_pages == many.pages.num_pages
