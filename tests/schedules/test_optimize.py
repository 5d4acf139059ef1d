"""`optimize`: legal, within its memory, never longer than registered schedules, the shortest where that is known."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from legal_devices import OPTIONS, takes
from tiers import tiers

from jaxpipe.errors import ScheduleError
from jaxpipe.lowering import spmd_makespan
from jaxpipe.schedules import (
    REGISTRY,
    Action,
    Costs,
    Kind,
    MemoryBound,
    Problem,
    Schedule,
    bidirectional,
    build,
    check,
    costs_of_stages,
    from_csv,
    from_json,
    linear,
    looped,
    optimize,
    peak_activations,
    peak_memory,
    simulate,
    split_backward,
    to_csv,
    to_json,
    zig_zag,
)
from jaxpipe.schedules.ordering.optimize import search
from jaxpipe.schedules.passes.vocabulary import vocabulary

UNIT = Costs()
UNEVEN = Costs(forward=1.0, backward=2.0, input_gradient=1.2, weight_gradient=0.8)
V4 = zig_zag(4, 2)


def makespan(schedule: Schedule, costs: Costs) -> float:
    return simulate(schedule, costs_of_stages(costs, schedule.placement)).makespan


def replayed_peak(schedule: Schedule, activations: float, weight_gradient: float, replica: float = 0.0) -> float:
    """The most bytes on a device, walked through by hand."""
    most = 0.0
    for row in schedule.rows:
        now = 0.0
        for action in row:
            before, after = {
                Kind.F: (activations, 0.0),
                Kind.B: (0.0, -activations),
                Kind.I: (max(0.0, weight_gradient - activations), min(0.0, weight_gradient - activations)),
                Kind.W: (0.0, -weight_gradient),
                Kind.SYNC: (0.0, 0.0),
            }[action.kind]
            most = max(most, now + before / schedule.placement.num_chunks)
            now += (before + after) / schedule.placement.num_chunks
        assert abs(now) < 1e-9
    return most + replica * schedule.num_replicas


def shortest_of_two_devices(num_microbatches: int, costs: Costs, slots: int) -> float:
    """The least makespan of all orders of all split backwards on two devices, one stage each."""

    def rows(stage: int) -> list[tuple[Action, ...]]:
        actions = [Action(kind, stage, m) for m in range(num_microbatches) for kind in (Kind.F, Kind.I, Kind.W)]
        legal = []
        for order in permutations(actions):
            held, fits, seen = 0, True, set()
            for kind, _, microbatch, *_ in order:
                held += kind is Kind.F
                fits &= held <= slots and all((before, microbatch) in seen for before in Kind if before in KINDS[kind])
                held -= kind is Kind.W
                seen.add((kind, microbatch))
            if fits:
                legal.append(order)
        return legal

    found = []
    for both in product(rows(0), rows(1)):
        try:
            found.append(simulate(Schedule("tried", linear(2), num_microbatches, both), costs).makespan)
        except ScheduleError:  # a circle
            continue
    return min(found)


KINDS = {Kind.F: (), Kind.I: (Kind.F,), Kind.W: (Kind.F, Kind.I)}


@pytest.mark.parametrize("costs", [UNIT, UNEVEN, replace(UNIT, weight_gradient=3.0, backward=4.0)])
@pytest.mark.parametrize("slots", [1, 2])
def test_no_order_of_two_devices_is_shorter(slots, costs):
    found = optimize(Problem(2, 2, (linear(2),)), costs=costs, memory_bound=slots, num_trials=200)
    assert makespan(check(found), costs) == pytest.approx(shortest_of_two_devices(2, costs, slots), abs=1e-9)
    assert peak_activations(found).max() <= slots


@pytest.mark.parametrize(
    ("placement", "last_starts"),
    # the device that starts last waits for the forwards before it, each 1/v of a device's share
    [(linear(4), 3), (V4, 3 / 2), (zig_zag(4, 4), 3 / 4), (bidirectional(linear(4)), 1), (looped(3, 2), 2 / 2)],
    ids=["linear", "V", "W", "both ways", "looped"],
)
def test_with_room_only_the_start_is_idle(placement, last_starts):
    problem = Problem(placement.num_devices, 12, (placement,))
    found = optimize(problem, costs=UNIT, memory_bound=12, num_trials=300)
    assert found.placement == placement
    assert makespan(check(found), UNIT) == pytest.approx(3 * 12 + last_starts)


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches"), [(1, 1), (1, 5), (2, 1), (2, 7), (3, 4), (4, 3), (4, 9), (5, 6)]
)
@pytest.mark.parametrize("limit", tiers([2.5], slow=[1]))
def test_legal_and_within_the_bound(num_devices, num_microbatches, limit):
    found = optimize(Problem(num_devices, num_microbatches), costs=UNEVEN, memory_bound=limit, num_trials=60)
    check(found)
    assert (found.num_devices, found.num_microbatches) == (num_devices, num_microbatches)
    assert peak_activations(found).max() <= limit


@pytest.mark.parametrize("placement", [linear(4), V4, looped(4, 2), zig_zag(4, 4), bidirectional(V4)])
@pytest.mark.parametrize("weight_gradient", tiers([2.5], slow=[0.25, 1.0]))
def test_one_microbatch_at_a_time_always_fits(placement, weight_gradient):
    least = (placement.num_chunks - 1 + max(1.0, weight_gradient)) / placement.num_chunks
    bound = MemoryBound(least, weight_gradient=weight_gradient)
    costs = replace(UNEVEN, backward=5.0)  # so that only split backwards are good
    found = check(optimize(Problem(4, 5, (placement,)), costs=costs, memory_bound=bound, num_trials=20))
    assert found.columns.is_kind(Kind.W).any()
    assert replayed_peak(found, 1.0, weight_gradient) <= least + 1e-9


@pytest.mark.ci
@pytest.mark.parametrize("costs", [UNIT, UNEVEN], ids=["equal", "uneven"])
@pytest.mark.parametrize("limit", [2, 4])
def test_never_longer_than_registered(limit, costs):
    found = makespan(optimize(Problem(4, 8), costs=costs, memory_bound=limit, num_trials=0), costs)
    times = {"forward": costs.forward, "input_gradient": costs.input_gradient, "weight_gradient": costs.weight_gradient}
    every = [*((name, {}) for name in REGISTRY), *OPTIONS]
    every += [(name, times) for name in REGISTRY if REGISTRY[name].takes_times]
    for name, options in every:
        if takes(name, 4, options):
            schedule = build(name, num_devices=4, num_microbatches=8, **options)
            if peak_activations(schedule).max() <= limit:
                assert found <= makespan(schedule, costs) + 1e-9, (name, options)


@pytest.mark.ci
def test_the_search_finds_what_registered_schedules_are_not():
    problem = Problem(4, 8)
    searched, known = (
        makespan(optimize(problem, costs=UNEVEN, memory_bound=2.5, num_trials=trials), UNEVEN) for trials in (100, 0)
    )
    assert searched < known - 0.5


def test_a_given_schedule_is_the_problem_and_a_candidate():
    given = build("1f1b", num_devices=4, num_microbatches=6)
    found = optimize(given, memory_bound=4, num_trials=100)
    assert found.placement == given.placement
    assert makespan(found, UNIT) < makespan(given, UNIT)
    whole = Costs(forward=1.0, backward=2.0, input_gradient=9.0, weight_gradient=9.0)
    assert optimize(given, costs=whole, memory_bound=4, num_trials=0) == given


def test_whole_backwards_where_they_are_cheaper():
    whole = Costs(forward=1.0, backward=2.0, input_gradient=3.0, weight_gradient=3.0)
    found = check(optimize(Problem(4, 6, (V4,)), costs=whole, memory_bound=3, num_trials=100))
    assert not found.columns.is_kind(Kind.I, Kind.W).any()
    assert makespan(found, whole) <= 3 * 6 * 2


def test_costs_are_of_a_device_whatever_its_chunks():
    for placement in (linear(4), V4, zig_zag(4, 4), bidirectional(V4)):
        schedule = optimize(Problem(4, 4, (placement,)), costs=UNEVEN, memory_bound=4, num_trials=10)
        timeline = simulate(schedule, costs_of_stages(UNEVEN, placement))
        assert timeline.makespan * (1 - timeline.bubble_ratio) == pytest.approx(3 * 4)


def test_costs_of_unequal_parts_are_summed_over_stages():
    parts = Costs(forward=(1.0, 2.0, 3.0, 4.0), backward=2.0)
    assert costs_of_stages(parts, linear(2)).forward == (3.0, 7.0)
    assert costs_of_stages(parts, linear(2)).backward == 2.0
    assert costs_of_stages(parts, zig_zag(2, 2)).forward == parts.forward
    assert costs_of_stages(parts, zig_zag(2, 2)).backward == 1.0
    assert costs_of_stages(Costs(update=0.5), zig_zag(2, 2)).update == 0.25
    with pytest.raises(ScheduleError, match=r"4 costs for num_stages=8[\s\S]*repair: give one number or 8"):
        optimize(Problem(2, 2, (zig_zag(2, 4),)), costs=parts, memory_bound=2)


def test_bytes_charge_both_replicas():
    problem = Problem(4, 8, (bidirectional(linear(4)), linear(4)))
    gib = 2.0**30
    sizes = {"activations": 2 * gib, "weight_gradient": 0.5 * gib, "replica": 10 * gib}
    both = optimize(problem, memory_bound=MemoryBound(28 * gib, **sizes), num_trials=100)
    one = optimize(problem, memory_bound=MemoryBound(21.9 * gib, **sizes), num_trials=100)
    assert (both.num_replicas, one.num_replicas) == (2, 1)
    for found, limit in ((both, 28 * gib), (one, 21.9 * gib)):
        peak = replayed_peak(found, 2 * gib, 0.5 * gib, 10 * gib)
        assert peak <= limit
        assert peak_memory(found, MemoryBound(limit, **sizes)).max() == pytest.approx(peak)


@pytest.mark.ci
def test_small_leftovers_for_weight_gradients_leave_room_for_more():
    problem = Problem(4, 12, (V4,))
    small, large = (
        makespan(optimize(problem, memory_bound=MemoryBound(2.0, weight_gradient=kept), num_trials=200), UNIT)
        for kept in (0.1, 3.0)
    )
    assert small < large


def test_peak_memory_in_ma_is_peak_activations():
    for name in ("zb_v", "chimera", "bpipe"):
        schedule = build(name, num_devices=4, num_microbatches=6)
        assert peak_memory(schedule, MemoryBound(9.0)).tolist() == peak_activations(schedule).tolist()


def test_a_bound_that_nothing_keeps_names_the_least_that_something_keeps():
    sizes = {"activations": 3.0, "replica": 5.0}
    with pytest.raises(ScheduleError, match=r"memory_bound=7\.9 for[\s\S]*rule memory-bound[\s\S]*set memory_bound=8"):
        optimize(Problem(4, 4), memory_bound=MemoryBound(7.9, **sizes))
    found = optimize(Problem(4, 4), memory_bound=MemoryBound(8.0, **sizes), num_trials=20)
    assert replayed_peak(found, 3.0, 3.0, 5.0) == 8.0


@pytest.mark.parametrize(
    ("problem", "bound", "said"),
    [
        (Problem(0, 4), 2, "num_devices=0"),
        (Problem(4, 0), 2, "num_microbatches=0"),
        (Problem(4, 4, (linear(3),)), 2, "rule problem-placement"),
        (build("pipedream_2bw", num_devices=2, num_microbatches=2), 4, "rule problem-flush"),
    ],
)
def test_impossible_problems_are_refused(problem, bound, said):
    with pytest.raises(ScheduleError, match=said):
        optimize(problem, memory_bound=bound)


@pytest.mark.parametrize("cost", [0.0, (1.0, -1.0)])
def test_impossible_costs_are_refused(cost):
    with pytest.raises(ScheduleError, match="rule option-time"):
        optimize(Problem(2, 2, (linear(2),)), costs=Costs(weight_gradient=cost), memory_bound=2)


@pytest.mark.parametrize("sizes", [{"limit": 0.0}, {"activations": -1.0}, {"weight_gradient": float("nan")}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ScheduleError, match="rule memory-size"):
        MemoryBound(**{"limit": 4.0, **sizes})


def test_the_same_question_has_the_same_answer():
    first, second = (optimize(Problem(4, 6), costs=UNEVEN, memory_bound=2.5, num_trials=40) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("placement", [linear(4), V4, bidirectional(linear(4))])
def test_goes_out_and_comes_back(placement):
    found = optimize(Problem(4, 6, (placement,)), costs=UNEVEN, memory_bound=2, num_trials=60)
    assert from_json(to_json(found)) == found
    if found.num_replicas == 1:
        assert from_csv(to_csv(found), name=found.name) == found


@pytest.mark.ci
def test_the_clock_decides():
    def only_registered(schedule: Schedule, costs: Costs) -> float:
        return simulate(schedule, costs).makespan + 100.0 * (schedule.name == "optimized")

    question = {"costs": UNEVEN, "memory_bound": 2.5, "num_trials": 100}
    assert optimize(Problem(4, 8), **question).name == "optimized"
    assert optimize(Problem(4, 8), **question, clock=only_registered).name != "optimized"


def test_on_the_spmd_clock_never_longer_than_registered():
    found = optimize(Problem(4, 6), costs=UNEVEN, memory_bound=3, clock=spmd_makespan, num_trials=60)
    best = spmd_makespan(found, costs_of_stages(UNEVEN, found.placement))
    for name in ("1f1b", "hanayo", "v_half", "v_min", "chimera"):
        schedule = build(name, num_devices=4, num_microbatches=6)
        if peak_activations(schedule).max() <= 3:
            assert best <= spmd_makespan(schedule, costs_of_stages(UNEVEN, schedule.placement)) + 1e-9, name


def registered_points(costs: Costs) -> list[tuple[float, float, str]]:
    """(peak activations in Ma, bubble ratio, name) of registered schedules, whole and split, D=8, N=32."""
    times = {"forward": costs.forward, "input_gradient": costs.input_gradient, "weight_gradient": costs.weight_gradient}
    every = [(name, {}) for name in REGISTRY] + [(name, times) for name in REGISTRY] + OPTIONS
    schedules = []
    for name, options in every:
        try:
            schedule = build(name, num_devices=8, num_microbatches=32, **options)
            schedules.append(schedule)
            schedules.append(split_backward(schedule, **({} if schedule.parks_pages else times)))
        except ScheduleError:  # no such option, or split already
            continue
    return [
        (
            float(peak_activations(schedule).max()),
            simulate(schedule, costs_of_stages(costs, schedule.placement)).bubble_ratio,
            schedule.name,
        )
        for schedule in schedules
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("costs", "num_better"), [(UNIT, 0), (UNEVEN, 3)], ids=["equal", "uneven"])
def test_no_registered_schedule_lies_below_the_curve(costs, num_better):
    points, better = registered_points(costs), 0
    for limit in (4, 4.5, 5, 6, 7, 8, 9, 10, 12, 14, 16):
        found = check(optimize(Problem(8, 32), costs=costs, memory_bound=limit))
        assert peak_activations(found).max() <= limit
        bubble = simulate(found, costs_of_stages(costs, found.placement)).bubble_ratio
        best = min(ratio for peak, ratio, _ in points if peak <= limit)
        assert bubble <= best + 1e-9, limit
        better += bubble < best - 1e-6
    assert better >= num_better


# With S and T, of a head that all devices share. No order is shorter than what its busiest device has to do, and the
# times at which the first and the last device can begin and end: (D - 1) forwards before, (D - 1) backwards behind.
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_a_schedule_with_a_shared_head_is_answered_with_one(name):
    costs = Costs(head_statistics=0.5, head_gradients=1.0)
    given = vocabulary(build(name, num_devices=4, num_microbatches=8), costs)
    bound = float(peak_activations(given).max())
    found = optimize(given, costs=costs, memory_bound=bound, num_trials=60)
    check(found)
    assert found.has_head_actions
    assert found.placement == given.placement
    assert peak_activations(found).max() <= bound
    assert 8 * (1 + 2 + 1.5) <= makespan(found, costs) <= makespan(given, costs)


def test_orders_searched_for_a_shared_head_are_shorter_than_registered_ones():
    costs = Costs(backward=3.0, head_statistics=0.5, head_gradients=1.0)
    given = vocabulary(build("1f1b", num_devices=4, num_microbatches=8), costs)
    found = search(given, costs=costs, memory_bound=8, num_trials=200)
    assert found.registered is not None
    assert found.registered.has_head_actions
    assert makespan(found.shortest, costs) <= makespan(found.registered, costs)


def test_the_head_of_a_given_schedule_needs_room():
    given = vocabulary(build("1f1b", num_devices=4, num_microbatches=8))
    with pytest.raises(ScheduleError, match=r"S and T keep up to 2 microbatches more\n  repair: set memory_bound=8"):
        optimize(given, memory_bound=1, num_trials=20)
