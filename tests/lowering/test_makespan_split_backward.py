"""Split backwards: the rolled program is as fast as the asynchronous clock, for measured costs too.

Where messages take time, what was measured on the whole grid below is the best that we know, rounded up.
"""

from itertools import product

import numpy as np
import pytest
from tiers import tiers

from jaxpipe.lowering import lower
from jaxpipe.lowering.lower import Folding
from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.lowering.rounds import LOCKSTEP_ROUNDS, lockstep_rounds
from jaxpipe.schedules import REGISTRY, Costs, Schedule, build, simulate, split_backward

pytestmark = pytest.mark.ci  # the tables themselves are held by test_tables_unchanged.py

NAMES = [name for name, method in REGISTRY.items() if method.has_split_backward]
TO_SPLIT = [name for name, method in REGISTRY.items() if not (method.has_split_backward or method.parks_pages)]
TIMES = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 0.9, 1.3)]  # of F, I, W
SOME_TIMES = tiers([], ci=TIMES[2:], slow=TIMES[:2])
MOST_TRACED = 17  # where devices meet one by one, four rounds of four kinds of action
MOST = {0.02: 1.02, 0.1: 1.07}  # at a transfer in forwards, from 2D microbatches on
TWO_REPLICAS = ("bitpipe", "chimera", "mixpipe")


def new(name: str, num_devices: int, num_microbatches: int, times: tuple[float, float, float]) -> Schedule:
    return build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options(times))


def split(name: str, num_devices: int, num_microbatches: int, times: tuple[float, float, float]) -> Schedule:
    return split_backward(build(name, num_devices=num_devices, num_microbatches=num_microbatches), **options(times))


def options(times: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("forward", "input_gradient", "weight_gradient"), times, strict=True))


def most_at_once(schedule: Schedule) -> float:
    """Upper bound where messages take no time: the one asked for, or what was measured, rounded up."""
    if schedule.name in TWO_REPLICAS and schedule.num_microbatches % schedule.num_devices:
        return 1.045  # the two holders of a stage meet to sum its gradients while one of them still has actions to do
    return 1.001


def most_exposed(schedule: Schedule) -> list[float]:
    """The same for the transfers of `MOST`."""
    if schedule.name == "breadth_first":
        return [1.03, 1.13]  # its forwards travel alone: in the round behind a forward no device has another one to do
    return list(MOST.values())


def assert_fast(schedule: Schedule, times: tuple[float, float, float]) -> None:
    costs = [Costs(**options(times), transfer=transfer, gradient_messages=0.0) for transfer in (0.0, *MOST)]
    table = lower(schedule, costs=costs[0])
    without, *exposed = replay_makespans(table, costs) / [simulate(schedule, each).makespan for each in costs]
    assert without <= most_at_once(schedule)
    assert table.num_traced_actions <= MOST_TRACED
    if schedule.num_microbatches >= 2 * schedule.num_devices:
        assert (exposed <= np.array(most_exposed(schedule))).all()


@pytest.mark.parametrize("times", SOME_TIMES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_rounds_cost_no_time(name, times):
    for num_devices, num_microbatches in ((2, 2), (4, 3), (4, 16), (8, 1), (8, 16)):
        assert_fast(new(name, num_devices, num_microbatches, times), times)


@pytest.mark.parametrize("times", SOME_TIMES, ids=str)
@pytest.mark.parametrize("name", TO_SPLIT)
def test_rounds_of_split_schedules_cost_no_time(name, times):
    for num_devices, num_microbatches in ((2, 2), (4, 8), (8, 8)):
        assert_fast(split(name, num_devices, num_microbatches, times), times)


@pytest.mark.slow
@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize(("name", "make"), [*product(NAMES, [new]), *product(TO_SPLIT, [split])])
def test_rounds_cost_no_time_anywhere(name, make, times):
    for num_devices in (2, 4, 8, 16):
        for num_microbatches in (1, num_devices - 1, num_devices, 2 * num_devices, 4 * num_devices):
            assert_fast(make(name, num_devices, num_microbatches, times), times)


@pytest.mark.parametrize("name", NAMES)
def test_stages_need_not_cost_the_same(name):
    schedule = new(name, 4, 8, TIMES[0])
    forward = tuple(1.0 + 0.1 * (stage % 3) for stage in range(schedule.num_stages))
    costs = Costs(forward=forward, input_gradient=forward, weight_gradient=forward)
    assert replay_makespans(lower(schedule, costs=costs), [costs])[0] <= 1.001 * simulate(schedule, costs).makespan


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved_1f1b"])
def test_nor_need_they_with_whole_backwards(name):
    """Though the fold that is fast at equal costs is not always so at these."""
    schedule = build(name, num_devices=8, num_microbatches=16)
    forward = tuple(1.0 + 0.3 * (stage % 3) for stage in range(schedule.num_stages))
    costs = Costs(forward=forward, backward=tuple(2 * each for each in forward))
    assert replay_makespans(lower(schedule, costs=costs), [costs])[0] <= 1.001 * simulate(schedule, costs).makespan


def test_rounds_of_whole_forwards_do_cost_time():
    """Where rounds know no other times, the checks above can fail."""
    schedule, costs = new("v_min", 8, 32, TIMES[2]), Costs(**options(TIMES[2]))
    rounds, send_round = lockstep_rounds(schedule, costs.in_forwards())
    table = Folding(schedule, (1,) * 16).fold(rounds, num_positions=LOCKSTEP_ROUNDS, send_round=send_round)
    assert replay_makespans(table, [costs])[0] > 1.05 * simulate(schedule, costs).makespan


def test_other_costs_than_expected_take_time():
    """Where W takes eight times as long as I, what is fast at all that is judged by default is not fast enough."""
    times = (1.0, 0.3, 2.5)
    schedule, costs = new("zb_v", 8, 16, times), Costs(**options(times))
    least = simulate(schedule, costs).makespan
    assert replay_makespans(lower(schedule), [costs])[0] > 1.3 * least
    assert replay_makespans(lower(schedule, costs=costs), [costs])[0] <= 1.04 * least
