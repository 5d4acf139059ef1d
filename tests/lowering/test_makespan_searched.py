"""Searched orders have no period, and their rounds go by the expected costs: what that costs.

At backwards of one and of two forwards nothing, at three next to nothing. Where messages take a tenth of a forward,
what was measured at 4, 8 and 16 devices and N in D, 4D is the best that we know, rounded up: between two forwards there
is one exchange, behind which nothing hides.
"""

import pytest
from legal_devices import tiered

from jaxpipe.lowering import lower
from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.schedules import Costs, build, simulate

# name, options, the ratios at a transfer of 0.1 forward with backwards of one, two, three
MEASURED = [
    ("bitpipe", {"scaling": "figure"}, (1.13, 1.10, 1.06)),
    ("bitpipe", {"scaling": "early_forwarding"}, (1.16, 1.14, 1.10)),
    ("bitpipe", {"scaling": "early_forwarding", "num_chunks": 1}, (1.18, 1.14, 1.10)),
    ("chimera", {"forward_doubling": True}, (1.15, 1.11, 1.04)),
    ("hanayo", {}, (1.17, 1.16, 1.06)),
    ("hanayo", {"waves": 2}, (1.18, 1.16, 1.06)),
    ("mixpipe", {}, (1.18, 1.16, 1.06)),
    ("mixpipe", {"injected": 4}, (1.18, 1.12, 1.06)),
]
FEW = [(4, 16), (8, 8)]
ALL = [(4, 4), *FEW, (8, 32), (16, 16), (16, 64)]


def slowdowns(name: str, num_devices: int, num_microbatches: int, backward: float, **options: object) -> list[float]:
    """The SPMD makespan over the asynchronous one without and with transfers of 0.1 forward."""
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
    table = lower(schedule, costs=Costs(backward=backward))
    costs = [Costs(backward=backward, transfer=transfer, gradient_messages=0.0) for transfer in (0.0, 0.1)]
    return (replay_makespans(table, costs) / [simulate(schedule, c).makespan for c in costs]).tolist()


def assert_as_measured(sizes, name, options, exposed):
    for num_devices, num_microbatches in sizes:
        for backward, most in zip((1.0, 2.0, 3.0), exposed, strict=True):
            without, likely = slowdowns(name, num_devices, num_microbatches, backward, **options)
            assert without <= (1.005 if backward == 3.0 else 1.001)
            assert likely <= most


@pytest.mark.parametrize(("name", "options", "exposed"), MEASURED, ids=str)
def test_what_searched_orders_lose(name, options, exposed):
    assert_as_measured(FEW, name, options, exposed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "exposed"), MEASURED, ids=str)
def test_what_searched_orders_lose_of_all(name, options, exposed):
    assert_as_measured(ALL, name, options, exposed)


@pytest.mark.parametrize(("name", "options", "exposed"), MEASURED, ids=str)
def test_nor_do_they_where_a_backward_takes_no_whole_forwards(name, options, exposed):
    for num_devices, num_microbatches in FEW:
        assert slowdowns(name, num_devices, num_microbatches, 2.3, **options)[0] <= 1.001


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(2, 4, 6, 8))
def test_no_schedule_loses_anything_at_one_and_two_forwards(name, options, num_devices):
    for num_microbatches in (1, 3, num_devices, num_devices + 1, 2 * num_devices + 3, 4 * num_devices):
        for backward in (1.0, 2.0):
            assert slowdowns(name, num_devices, num_microbatches, backward, **options)[0] <= 1.001
