"""Is the rolled SPMD program as fast as devices that need not keep step?"""

from itertools import product

import numpy as np
import pytest
from user_schedules import PLACEMENTS, TWO_WAYS, random_schedule

from jaxpipe.lowering import lower, replay
from jaxpipe.lowering.lower import Folding
from jaxpipe.lowering.rounds import earliest_rounds
from jaxpipe.schedules import Costs, build, simulate

# Schedules with transfers are in test_transfers.py; orders that are searched, in test_makespan_in_step.py.
BACKWARD_COSTS = (1.0, 2.0, 3.0)  # in forwards
FEW = [*product((2, 3, 5, 8, 16), (1, 3, 8, 17, 64)), (64, 8), (64, 64), (3, 512)]
ALL = [
    *product(range(2, 9), range(1, 17)),
    *product((2, 3, 4, 6, 8, 12, 16, 24, 31, 32, 48, 64), (1, 2, 4, 7, 16, 31, 33, 64, 100, 128, 255, 512)),
]


def assert_fast(name: str, num_devices: int, num_microbatches: int) -> None:
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    table = lower(schedule)
    for backward in BACKWARD_COSTS:
        makespan = replay(table, Costs(backward=backward)).makespan
        assert makespan / simulate(schedule, Costs(backward=backward)).makespan <= 1.001
        # BitPipe (arXiv 2410.19367), Table 2: bubble ratio (D-1)/(N+D-1), so N+D-1 times F and B.
        assert makespan <= 1.001 * (num_microbatches + num_devices - 1) * (1 + backward)
        if num_devices >= 8:
            costs = Costs(backward=backward, transfer=0.1)
            assert replay(table, costs).makespan / simulate(schedule, costs).makespan <= 1.02


@pytest.mark.parametrize(("num_devices", "num_microbatches"), FEW)
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_rounds_cost_no_time(name, num_devices, num_microbatches):
    assert_fast(name, num_devices, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_rounds_cost_no_time_anywhere(name):
    for num_devices, num_microbatches in ALL:
        assert_fast(name, num_devices, num_microbatches)


def test_a_bad_fold_costs_time():
    """With one body position every permute couples all neighbours in every round: the check above can fail."""
    schedule = build("1f1b", num_devices=8, num_microbatches=32)
    bad = Folding(schedule, (1,) * 8).fold(earliest_rounds(schedule), num_body_rounds=1)
    assert replay(bad).makespan / simulate(schedule).makespan > 1.05


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), *TWO_WAYS.values()], ids=[*PLACEMENTS, *TWO_WAYS])
def test_rounds_are_never_faster_than_no_rounds(placement):
    for seed, transfer in product(range(4), (0.0, 0.1, 2.0)):
        schedule = random_schedule(placement, num_microbatches=5, seed=seed)
        costs = Costs(backward=tuple(1.0 + stage % 3 for stage in range(schedule.num_stages)), transfer=transfer)
        least = simulate(schedule, costs).makespan
        for rolled in (True, False):
            assert replay(lower(schedule, rolled=rolled), costs).makespan >= least * (1 - 1e-12)


def test_the_clock_of_one_microbatch_by_hand():
    """F 1, B 2, transfer 0.25: the message of a round travels from the start of the next one."""
    table = lower(build("gpipe", num_devices=2, num_microbatches=1))
    times = replay(table, Costs(forward=1.0, backward=2.0, transfer=0.25))
    # Device 0: F, sends and waits; device 1: F, B from 1.25; device 0: B once the gradient has come.
    assert times.makespan == pytest.approx(1 + 0.25 + 1 + 2 + 0.25 + 2)


def test_a_transfer_hides_behind_the_action_of_its_round():
    """Device 1 computes the F of microbatch 0 while that of microbatch 1 arrives."""
    table = lower(build("gpipe", num_devices=2, num_microbatches=8))
    slow, fast = (replay(table, Costs(transfer=transfer)).makespan for transfer in (0.5, 0.0))
    # Only the first activation and the last gradient have nothing to hide behind.
    assert slow - fast == pytest.approx(2 * 0.5)
    exposed = replay(table, Costs(transfer=1.5)).makespan
    assert exposed > fast + 8 * 0.5  # longer than a forward: seen in every round of forwards


def test_a_link_of_its_own_time_is_charged_to_its_pair():
    schedule = build("1f1b", num_devices=4, num_microbatches=4)
    table = lower(schedule)
    costs = Costs(link={(2, 1): 5.0})
    assert replay(table, costs).makespan >= simulate(schedule, costs).makespan > replay(table).makespan


def test_rounds_start_where_the_one_before_ended():
    times = replay(lower(build("1f1b", num_devices=4, num_microbatches=6)), Costs(transfer=0.3))
    np.testing.assert_array_equal(times.start[1:], times.end[:-1])
    assert (times.end >= times.start).all()
