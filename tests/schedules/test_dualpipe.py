"""DualPipe and DualPipeV: the published steps, their bubble and peak, and what is ours beyond them.

Peaks are those that the README of github.com/deepseek-ai/DualPipe gives, PP + 1 stages' activations. The least
bubbles follow from the placement: a device cannot start before the first forward has come to it.
"""

import re
from itertools import product

import pytest

from jaxpipe.schedules import Costs, Kind, Schedule, build, check, peak_activations, simulate

TIMES = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (1.0, 0.9, 1.3), (2.0, 1.0, 1.0), (1.0, 2.0, 1.0))  # of F, I and W


def costs(forward: float, input_gradient: float, weight_gradient: float) -> Costs:
    return Costs(forward, input_gradient + weight_gradient, input_gradient, weight_gradient)


def published(depth: int, num_depths: int, num_each: int) -> str:
    """The row of a rank as the repository's comments write it: F0 is a forward of the nearer direction, B a backward.

    Where the repository computes weight gradients later, I stands for the backward and W for the rest.
    """
    outer, inner = num_depths - depth - 1, depth + 1
    last = "B1 B0 " * (inner // 2) + ("" if inner % 2 == 0 else "B1 I0 ") + "I1 I0 " * (inner // 2)
    return (
        "F0 " * (2 * outer)
        + "F0 F1 " * inner
        + "I1 W F1 " * outer
        + "F0 B1 F1 B0 " * (num_each - 2 * num_depths + inner)
        + "B1 F1 B0 " * outer
        + last
        + "W I0 " * outer
        + "W " * inner
    ).strip()


def written(schedule: Schedule, device: int, *, is_near) -> str:
    row = [action for action in schedule.rows[device] if action.kind is not Kind.SYNC]
    kinds = [f"{action.kind.name}{0 if is_near(action) else 1}" for action in row]
    return re.sub(r"W\d", "W", " ".join(kinds))


def test_rows_are_the_published_steps():
    for d, n in product((1, 2, 3, 4, 7), (14, 19)):
        schedule = build("dualpipe_v", num_devices=d, num_microbatches=n)
        for device in range(d):
            row = written(schedule, device, is_near=lambda action: action.stage < d)  # noqa: B023
            assert row == published(device, d, n)
    for d, n in product((2, 4, 6, 8), (16, 20)):
        schedule = build("dualpipe", num_devices=d, num_microbatches=n)
        for device in range(d):
            near = device >= d // 2
            row = written(schedule, device, is_near=lambda action: action.replica == near)  # noqa: B023
            assert row == published(min(device, d - 1 - device), d // 2, n // 2)


def test_weight_gradients_are_first_in_first_out():
    for row in build("dualpipe_v", num_devices=4, num_microbatches=11).rows:
        halves = [[action[1:] for action in row if action.kind is kind] for kind in (Kind.I, Kind.W)]
        assert halves[0] == halves[1]


@pytest.mark.parametrize("backward_first", [False, True])
def test_bubble_is_the_least_there_is(backward_first):
    for d, n in product((1, 2, 3, 4, 5, 8, 13), (1, 2, 5, 8, 13, 16, 29)):
        schedule = build("dualpipe_v", num_devices=d, num_microbatches=n, backward_first=backward_first)
        timeline = simulate(schedule)
        if n >= d:
            assert timeline.makespan == 6 * n + d - 1, (d, n)
            assert timeline.bubble_ratio == pytest.approx((d - 1) / (6 * n + d - 1))
        if d % 2 == 0:
            schedule = build("dualpipe", num_devices=d, num_microbatches=n, backward_first=backward_first)
            if n >= d:
                assert simulate(schedule).makespan == 3 * n + d / 2 - 1, (d, n)
                assert simulate(schedule).bubble_ratio == pytest.approx((d - 2) / (6 * n + d - 2))


def test_bubble_at_other_times_is_the_least_where_backwards_are_long_in_their_weights():
    for d, times in product((2, 4, 8), ((1.0, 1.0, 1.0), (1.0, 0.9, 1.3), (2.0, 1.0, 2.0), (1.0, 1.0, 2.0))):
        options = dict(zip(("forward", "input_gradient", "weight_gradient"), times, strict=True))
        for name, least in (("dualpipe_v", d - 1), ("dualpipe", d / 2 - 1)):
            schedule = build(name, num_devices=d, num_microbatches=3 * d, **options)
            work = 3 * d * schedule.placement.num_chunks * sum(times)
            assert simulate(schedule, costs(*times)).makespan == pytest.approx(work + least * times[0])


def test_bubble_is_no_more_than_the_published_formula():
    """(H-1)(F&B + B - 3W), where F&B takes as long as F and B."""
    for d, (f, i, w) in product((4, 8), TIMES):
        for name, num_depths in (("dualpipe_v", d), ("dualpipe", d // 2)):
            schedule = build(name, num_devices=d, num_microbatches=2 * d)
            work = 2 * d * schedule.placement.num_chunks * (f + i + w)
            bubble = simulate(schedule, costs(f, i, w)).makespan - work
            assert bubble <= (num_depths - 1) * (f + (i + w) + (i + w) - 3 * w) + 1e-9, (name, d, f, i, w)


def test_peaks():
    for d, n in product((2, 4, 8, 10), (1, 2, 9, 11, 24)):
        stages = build("dualpipe_v", num_devices=d, num_microbatches=n)
        replicas = build("dualpipe", num_devices=d, num_microbatches=n)
        if n > d:  # PP + 1 of PP stages, which are two for each device of a V
            assert peak_activations(stages).tolist() == [(2 * d + 1) / 2] * d
            assert peak_activations(replicas).tolist() == [d + 1] * d
        for schedule in (stages, replicas):
            assert peak_activations(schedule).max() <= n
            first = build(schedule.name, num_devices=d, num_microbatches=n, backward_first=True)
            assert peak_activations(first).max() == min(d, n)


def test_required_figures():
    schedule = build("dualpipe_v", num_devices=8, num_microbatches=32)
    assert simulate(schedule).bubble_ratio == pytest.approx(7 / 199)
    assert peak_activations(schedule).max() == 8.5


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe_v"])
def test_orders_for_measured_times_are_better_where_they_can_be(name):
    strictly = set()
    for (d, n), times in product(((4, 9), (8, 16), (6, 4)), TIMES):
        plain = build(name, num_devices=d, num_microbatches=n)
        options = dict(zip(("forward", "input_gradient", "weight_gradient"), times, strict=True))
        timed = check(build(name, num_devices=d, num_microbatches=n, **options))
        before, after = (simulate(each, costs(*times)).makespan for each in (plain, timed))
        assert after <= before + 1e-9
        assert peak_activations(timed).max() <= peak_activations(plain).max()
        strictly |= {times} if after < before - 0.1 else set()
    assert {(1.0, 1.2, 0.8), (1.0, 2.0, 1.0)} <= strictly
