"""The forwards alone: as short as their placement allows, whatever order a method has them in."""

import pytest

from jaxpipe.schedules import REGISTRY, Costs, Kind, Schedule, build, simulate
from jaxpipe.schedules.passes.forwards import forwards_only
from jaxpipe.schedules.passes.vocabulary import vocabulary

V_SHAPED = ("hanayo", "zb_v", "v_half", "v_min", "dualpipe_v")
TWO_REPLICAS = ("gems", "chimera", "mixpipe", "dualpipe", "bitpipe")


def in_the_order_of_the_method(schedule: Schedule) -> Schedule:
    rows = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows)


@pytest.mark.parametrize("sizes", [(2, 4), (4, 8), (6, 12), (8, 16)], ids=str)
@pytest.mark.parametrize("name", REGISTRY)
def test_they_take_the_work_of_a_device_and_the_way_to_it(name, sizes):
    num_devices, num_microbatches = sizes
    if name == "bpipe" and num_devices == 2:
        pytest.skip("BPipe moves nothing on two devices")
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    forwards = forwards_only(schedule)
    assert sorted(map(sorted, forwards.rows)) == sorted(map(sorted, in_the_order_of_the_method(schedule).rows))
    # A device of two stages is reached, and left again, over all others; a replica begins at either end.
    work = num_microbatches * schedule.placement.num_chunks
    to_last = (2 if name in V_SHAPED else 1) * (num_devices - 1)
    way = num_devices - 2 if name in TWO_REPLICAS else to_last
    assert simulate(forwards).makespan == work + way


def test_a_good_order_stays_as_it_is():
    for name in ("1f1b", "interleaved_1f1b", "zb_v"):
        schedule = build(name, num_devices=4, num_microbatches=8)
        assert forwards_only(schedule).rows == in_the_order_of_the_method(schedule).rows


def test_a_split_head_meets_in_the_order_of_the_method():
    costs = Costs(head_statistics=0.2, head_gradients=0.3)
    schedule = vocabulary(build("v_min", num_devices=4, num_microbatches=8), costs)
    kept = {Kind.F, Kind.S, Kind.T}
    assert forwards_only(schedule).rows == tuple(
        tuple(action for action in row if action.kind in kept) for row in schedule.rows
    )


def test_so_much_longer_are_the_orders_of_methods():
    """What the module and the changelog say of 8 devices and 16 microbatches."""
    told = {"gems": (128, 22), "chimera": (28, 22), "bitpipe": (44, 38), "v_half": (68, 46), "v_min": (86, 46)}
    for name, both in told.items():
        schedule = build(name, num_devices=8, num_microbatches=16)
        forms = in_the_order_of_the_method(schedule), forwards_only(schedule)
        assert tuple(simulate(form).makespan for form in forms) == both
