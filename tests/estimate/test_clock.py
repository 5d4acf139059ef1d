"""The clock for thousands of settings against the simulator, and many microbatches against all of them simulated."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from legal_devices import tiered, variants

from jaxpipe.estimate.clock import Seconds, ends, few_microbatches, least_ends, makespans
from jaxpipe.lowering import lower
from jaxpipe.schedules import Costs, build, simulate
from jaxpipe.schedules.analysis.simulate import Clock, clock_of
from jaxpipe.schedules.passes.overlap import num_pairs, overlap
from jaxpipe.schedules.schedule import Kind
from jaxpipe.schedules.spec import ScheduleSpec

SLOT, GRADIENTS = 3.0, 2.0  # in messages


def uneven(num_stages: int, seed: int) -> Costs:
    """Times that differ from stage to stage, and a last stage with a head."""
    times = np.random.default_rng(seed).uniform(0.8, 1.2, (4, num_stages)) * [[1.0], [2.0], [1.1], [0.9]]
    times[0, -1] += 1.3
    forward, backward, input_gradient, weight_gradient = map(tuple, times.tolist())
    return Costs(forward, backward, input_gradient, weight_gradient)


def seconds_of(costs: Costs, num_stages: int, num_devices: int, *, transfer: float) -> Seconds:
    """The same, with bytes of which each takes a second times `transfer`."""
    return Seconds(
        of_kind=costs.of_kind(num_stages),
        closing=np.zeros(num_stages),
        latency=np.zeros((num_devices, num_devices)),
        per_byte=np.full((num_devices, num_devices), transfer),
        message_bytes=1.0,
        slot_bytes=np.full(num_stages, SLOT),
        exchange_bytes=np.full(num_stages, GRADIENTS),
    )


@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(4, 5))
def test_the_clock_is_the_simulators(name, options, num_devices):
    for num_microbatches, transfer in product((1, 7, 16), (0.0, 0.1, 1.0)):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
        costs = uneven(schedule.num_stages, seed=num_microbatches)
        found = makespans(Clock(schedule), seconds_of(costs, schedule.num_stages, num_devices, transfer=transfer))
        simulated = simulate(
            schedule, replace(costs, transfer=transfer, slot_messages=SLOT, gradient_messages=GRADIENTS)
        )
        assert found.exchanged_s == pytest.approx(simulated.makespan, rel=1e-12)
        assert found.closed_s == found.exchanged_s
        if transfer == 0.0:
            assert 1 - found.work_s / found.computed_s == pytest.approx(simulated.bubble_ratio, abs=1e-12)


@pytest.mark.parametrize("unit", ["page", "microbatch"])
def test_computations_wait_for_what_is_loaded_late(unit):
    schedule, costs = build("bpipe", num_devices=8, num_microbatches=16, unit=unit), uneven(8, seed=1)
    clock, waited = Clock(schedule), []
    for transfer in (0.01, 0.3, 1.0, 3.0):
        seconds = seconds_of(costs, 8, 8, transfer=transfer)
        simulated = simulate(schedule, replace(costs, transfer=transfer, slot_messages=SLOT)).makespan
        assert makespans(clock, seconds).exchanged_s == pytest.approx(simulated, rel=1e-12)
        free = makespans(clock, replace(seconds, slot_bytes=np.zeros(8))).exchanged_s
        waited.append(simulated > free * (1 + 1e-9))
    assert not waited[0]
    assert waited[-1]


def test_what_closes_a_stage_holds_up_its_device_and_no_message():
    """1F1B, N = 1: down F of all stages, up B of all; the sum of each stage stands beside the next one's B."""
    clock, costs = Clock(build("1f1b", num_devices=4, num_microbatches=1)), Costs(1.0, 2.0)
    seconds = seconds_of(costs, 4, 4, transfer=0.0)
    seconds.closing[:] = [0.5, 0.25, 0.25, 1.0]
    found = makespans(clock, seconds)
    assert (found.exchanged_s, found.closed_s) == (4 * 3.0, 4 * 3.0 + 0.5)
    seconds.closing[:] = [0.0, 0.0, 0.0, 7.0]
    assert makespans(clock, seconds).closed_s == 4 * 1.0 + 2.0 + 7.0


def test_without_flush_a_device_closes_all_of_its_stages_between_two_batches():
    seconds = seconds_of(Costs(), 4, 2, transfer=0.0)
    seconds.closing[:] = [1.0, 2.0, 4.0, 8.0]
    found = makespans(Clock(build("wpipe", num_devices=2, num_microbatches=2)), seconds)
    assert found.closed_s - found.exchanged_s == 2.0 + 8.0


def test_what_closes_a_stage_holds_up_the_next_action_of_its_device():
    """Two stages on one device: F0 F1 B1 and its sum, B0 and its sum."""
    clock = Clock(build("interleaved_1f1b", num_devices=1, num_microbatches=1))
    seconds = seconds_of(Costs(1.0, 2.0), 2, 1, transfer=0.0)
    seconds.closing[:] = [0.5, 0.25]
    assert makespans(clock, seconds).closed_s == 2 * 3.0 + 0.75


def with_a_head(num_stages: int, seed: int) -> Costs:
    """Stages that are equally long but for the head of the last."""
    del seed
    return Costs((*[1.0] * (num_stages - 1), 2.3), 2.0, 1.05, 0.95)


def tolerance(name: str, options: dict, *, is_even: bool) -> float:
    """What `jaxpipe.estimate.clock` says of itself."""
    if options.get("scaling") == "early_forwarding":
        return 0.04
    if name.startswith(("zb", "v_")):
        return 0.02
    return 1e-9 if is_even else 4e-3


def assert_on_a_line(name: str, options: dict, num_devices: int, numbers: tuple[int, ...]) -> None:
    written = ",".join(f"{key}={str(value).lower()}" for key, value in options.items())
    for num_microbatches, transfer, costs in product(numbers, (0.0, 0.1), (with_a_head, uneven)):
        whole = Clock(build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options))
        num_stages = whole.schedule.num_stages
        seconds = seconds_of(costs(num_stages, seed=0), num_stages, num_devices, transfer=transfer)
        spec = ScheduleSpec(name, num_devices, written)
        found = ends(spec, num_microbatches, seconds)
        assert len(few_microbatches(spec, num_microbatches)) == 2
        expected, rel = makespans(whole, seconds), tolerance(name, options, is_even=costs is with_a_head)
        for field in ("computed_s", "exchanged_s", "work_s"):
            assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=rel)


FAST = [each for each in variants(4) if "group_size" not in each[1]]


@pytest.mark.parametrize(
    ("name", "options", "num_devices"),
    [
        each if i % 12 == 0 else pytest.param(*each, marks=pytest.mark.slow if i % 2 else pytest.mark.ci)
        for i, each in enumerate(FAST)
    ],
)
def test_many_microbatches_are_on_a_line_with_few(name, options, num_devices):
    assert_on_a_line(name, options, num_devices, (40, 43))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(5, 6, 8))
def test_many_microbatches_are_on_a_line_with_few_on_more_devices(name, options, num_devices):
    assert_on_a_line(name, options, num_devices, (96, 101))


def test_a_pair_is_shorter_by_what_hides_in_the_shorter_of_its_stages():
    sizes = {"num_devices": 2, "num_microbatches": 8, "num_chunks": 2, "extra_warm_up": True}
    schedule = overlap(build("interleaved_1f1b", **sizes))
    costs = Costs(pair=0.8)
    of_pair = seconds_of(costs, 4, 2, transfer=0.0)
    # 0.2 of F and B, which take 3.
    alike = replace(of_pair, hidden=np.full(4, 0.6))
    assert makespans(clock_of(schedule), alike).computed_s == pytest.approx(simulate(schedule, costs).makespan)
    hidden = np.array([0.6, 0.1, 0.2, 0.4])
    columns = schedule.columns
    first = np.flatnonzero(columns.partner > np.arange(len(columns.partner)))
    less = np.minimum(hidden[columns.stage[first]], hidden[columns.stage[columns.partner[first]]])
    work = np.full(2, 8 * 2 * 3.0) - np.bincount(columns.device[first], less)
    found = makespans(clock_of(schedule), replace(of_pair, hidden=hidden))
    assert found.work_s == pytest.approx(work.max())
    assert makespans(clock_of(schedule), of_pair).computed_s == pytest.approx(simulate(schedule).makespan)


def test_of_the_pairs_of_the_rows_those_hide_something_that_the_program_computes_as_one():
    spec = ScheduleSpec("dualpipe_v", 4).with_pairs(Costs())
    schedule = spec.build(8)
    num_computed = (lower(schedule).kind == Kind.PAIR).sum(axis=0)  # of each device
    assert 0 < num_computed.sum() < num_pairs(schedule)
    hidden = replace(seconds_of(Costs(), 8, 4, transfer=0.0), hidden=np.full(8, 0.6))
    work = 8 * 2 * 3.0 - 0.6 * num_computed
    for clock in (ends, least_ends):
        assert clock(spec, 8, hidden).work_s == pytest.approx(work.max())
