"""The rolled SPMD program is as fast as the asynchronous clock, where nothing says otherwise."""

from itertools import product

import numpy as np
import pytest
from legal_devices import OPTIONS
from tiers import tiers
from user_schedules import PLACEMENTS, TWO_WAYS, random_schedule

from jaxpipe.lowering import lower, replay
from jaxpipe.lowering.lower import Folding
from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.lowering.rounds import earliest_rounds
from jaxpipe.schedules import Costs, build, simulate

# Schedules with EVICT and LOAD are in test_parking.py; searched orders, in test_makespan_searched.py.
BACKWARD_COSTS = (1.0, 2.0, 3.0)  # in forwards
FEW = [*product((2, 3, 5, 8), (1, 3, 8, 17))]
MORE = [*product((2, 3, 5, 8), (64,)), *product((16,), (1, 3, 8, 17, 64)), (64, 8), (64, 64), (3, 512)]
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


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches"), [*FEW, *(pytest.param(*sizes, marks=pytest.mark.ci) for sizes in MORE)]
)
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_rounds_cost_no_time(name, num_devices, num_microbatches):
    assert_fast(name, num_devices, num_microbatches)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_rounds_cost_no_time_anywhere(name):
    for num_devices, num_microbatches in ALL:
        assert_fast(name, num_devices, num_microbatches)


def test_a_bad_fold_costs_time():
    """With one body round every permute couples all neighbours in every round: the check above can fail."""
    schedule = build("1f1b", num_devices=8, num_microbatches=32)
    bad = Folding(schedule, (1,) * 8).fold(earliest_rounds(schedule), num_positions=1)
    assert replay(bad).makespan / simulate(schedule).makespan > 1.05


PLACES = {**PLACEMENTS, **TWO_WAYS}


@pytest.mark.parametrize("name", tiers(list(PLACES)[::3], slow=[name for i, name in enumerate(PLACES) if i % 3]))
def test_rounds_are_never_faster_than_no_rounds(name):
    placement = PLACES[name]
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


def test_permutes_that_block_by_hand():
    """F 1, B 2, transfer 0.25, two microbatches: each message is there before its round's actions begin."""
    table = lower(build("gpipe", num_devices=2, num_microbatches=2))
    costs = Costs(forward=1.0, backward=2.0, transfer=0.25)
    # Device 0: F, message, F, message; device 1: two F, B, message, B, message; device 0: two B.
    assert replay(table, costs, blocking=True).makespan == pytest.approx(2 * 1.25 + 2 * 1 + 2 * 2.25 + 2 * 2)
    # Beside actions the second message each way is hidden; device 0 does its first B while device 1 does its second.
    assert replay(table, costs).makespan == pytest.approx(1.25 + 2 * 1 + 2 + 0.25 + 2 * 2)


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


# ---- Schedules with a period: one program, as fast as the asynchronous clock, whatever actions cost ----

NAMES = ("1f1b", "bitpipe", "breadth_first", "chimera", "gems", "gpipe", "interleaved_1f1b")
# Of a larger group only whole ones have the period: eight microbatches are not nine.
FOLDED = [
    *((name, {}) for name in NAMES),
    *(
        (name, options)
        for name, options in OPTIONS
        if name in NAMES and not {"scaling", "forward_doubling", "group_size"} & set(options)
    ),
]
MOST = 1.03  # at a transfer of 0.1 forward


def slowdowns(name: str, num_devices: int, num_microbatches: int, transfer: float, **options: object) -> list[float]:
    """[backward cost] the SPMD makespan of one program over the asynchronous one; the exchange takes no time."""
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
    costs = [Costs(backward=backward, transfer=transfer, gradient_messages=0.0) for backward in BACKWARD_COSTS]
    return (replay_makespans(lower(schedule), costs) / [simulate(schedule, c).makespan for c in costs]).tolist()


def most_exposed(name: str, num_devices: int, options: dict[str, object]) -> float:
    """Upper bound at a transfer of 0.1 forward: the one asked for, or what was measured, rounded up."""
    if name == "breadth_first" and options.get("num_chunks", 2) > 1:
        return 1.10  # its forwards travel alone: in the round behind a forward no device has another one to do
    if num_devices == 4 and name == "bitpipe":
        return 1.035  # of four devices the messages of a unit's ends are a larger part
    return MOST


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}-{options}", marks=pytest.mark.ci if options or i % 2 else ())
        for i, (name, options) in enumerate(FOLDED)
    ],
)
def test_periodic_rounds_cost_no_time(name, options):
    for num_devices, num_microbatches in ((4, 16), (8, 8), (16, 16)):
        assert max(slowdowns(name, num_devices, num_microbatches, 0.0, **options)) <= 1.001
        most = most_exposed(name, num_devices, options)
        assert max(slowdowns(name, num_devices, num_microbatches, 0.1, **options)) <= most


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), FOLDED, ids=str)
def test_periodic_rounds_cost_no_time_anywhere(name, options):
    for num_devices, multiple in product((4, 6, 8, 12, 16, 24), (1, 2, 3, 4, 8)):
        assert max(slowdowns(name, num_devices, multiple * num_devices, 0.0, **options)) <= 1.001
        most = most_exposed(name, num_devices, options)
        assert max(slowdowns(name, num_devices, multiple * num_devices, 0.1, **options)) <= most
