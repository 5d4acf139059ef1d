"""Early forwarding, MixPipe and Hanayo, whose orders come from list scheduling: bubbles, peaks, symmetry.

Costs are a forward of one, a backward of two, no transfers. Of two replicas in opposite directions no order has a
bubble below 3(D-2)/2 forwards of a stage: the devices in the middle start D/2-1 forwards after those at the ends and
end D/2-1 backwards before them. Published numbers are of BitPipe, arXiv 2410.19367: early forwarding's bubble ratio
(D-2)/(4N+D-2) and peak (3D-3)/2 Ma for two chunks, MixPipe's peak (3D-2)/2 Ma.
"""

import importlib
from itertools import product

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    Costs,
    Kind,
    Schedule,
    bidirectional,
    build,
    check,
    peak_activations,
    simulate,
    zig_zag,
)
from jaxpipe.schedules.methods.bitpipe import early_forwarding
from jaxpipe.schedules.schedule import COMPUTE_KINDS

# (D, N)
SHOWN = [(d, k * d) for d in (4, 6, 8, 10, 12, 16) for k in (2, 4)] + [(8, 64)]


def forwarded(num_devices: int, num_microbatches: int, num_chunks: int = 2) -> Schedule:
    rows = early_forwarding(num_devices=num_devices, num_chunks=num_chunks, num_microbatches=num_microbatches)
    return Schedule("forwarded", bidirectional(zig_zag(num_devices, num_chunks)), num_microbatches, rows)


def mixed(num_devices: int, num_microbatches: int, injected: int | str = "max") -> Schedule:
    return build("mixpipe", num_devices=num_devices, num_microbatches=num_microbatches, injected=injected)


def waved(num_devices: int, num_microbatches: int, waves: int) -> Schedule:
    return build("hanayo", num_devices=num_devices, num_microbatches=num_microbatches, waves=waves)


def bubble(schedule: Schedule, backward: float = 2.0) -> float:
    """Makespan without the work of a device, in forwards of a stage."""
    work = (1 + backward) * schedule.placement.num_chunks * schedule.num_microbatches
    return simulate(schedule, Costs(forward=1.0, backward=backward)).makespan - work


def is_mirrored(schedule: Schedule) -> bool:
    """Whether device D-1-d does for one replica what device d does for the other, at the same times."""
    timeline = simulate(schedule)
    starts = iter(timeline.start.tolist())
    timed = [
        [(each.kind, each.stage, each.replica, start) for each, start in zip(row, starts, strict=False)]
        for row in schedule.rows
    ]
    other = [[(kind, stage, 1 - replica, start) for kind, stage, replica, start in row] for row in reversed(timed)]
    return timed == other


@pytest.mark.parametrize(("d", "n"), [pytest.param(d, n, marks=pytest.mark.ci if d > 12 else ()) for d, n in SHOWN])
def test_early_forwarding_has_the_published_bubble_and_no_more_than_the_published_peak(d, n):
    schedule = check(forwarded(d, n))
    assert simulate(schedule).bubble_ratio == pytest.approx((d - 2) / (4 * n + d - 2), abs=1e-12)
    assert peak_activations(schedule).max() <= (3 * d - 3) / 2
    assert is_mirrored(schedule)


@pytest.mark.parametrize("n", [8, 16])
def test_early_forwarding_of_four_devices_has_the_published_peak(n):
    assert peak_activations(forwarded(4, n)).max() == (3 * 4 - 3) / 2


@pytest.mark.parametrize(
    ("d", "v"),
    [
        *((2, 1), (4, 1), (8, 1), (2, 3), (4, 3), (6, 3), (4, 4), (4, 5)),
        *(pytest.param(8, v, marks=pytest.mark.ci) for v in (3, 4)),
    ],
)
def test_early_forwarding_of_other_numbers_of_chunks_has_the_least_bubble(d, v):
    for n in (2 * d, 4 * d):
        schedule = check(forwarded(d, n, v))
        assert bubble(schedule) == 3 * (d - 2) / 2, n
        assert is_mirrored(schedule)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("d", [2, 4, 6])
def test_early_forwarding_is_never_worse_than_units(d, v):
    for n in range(1, 2 * d + 3):
        units = build("bitpipe", num_devices=d, num_microbatches=n, num_chunks=v)
        forwards = check(forwarded(d, n, v))
        assert simulate(forwards).makespan <= simulate(units).makespan, n
        if n <= d:
            compute = tuple(tuple(each for each in row if each.kind in COMPUTE_KINDS) for row in units.rows)
            assert forwards.rows == compute


@pytest.mark.ci
def test_early_forwarding_of_many_microbatches_reuses_what_is_best_for_fewer():
    schedule = forwarded(16, 512)
    assert bubble(schedule) == 3 * (16 - 2) / 2
    assert peak_activations(schedule).max() <= (3 * 16 - 3) / 2


@pytest.mark.slow
def test_early_forwarding_is_searched_again_where_that_does_not_last():
    # what is best for 32 microbatches of four chunks leaves a bubble of 46 with 64
    assert bubble(forwarded(8, 64, 4)) == 3 * (8 - 2) / 2


@pytest.mark.parametrize(("d", "k"), list(product((2, 4, 6, 8, 12, 16), (2, 4, 6))))
def test_mixpipe_with_most_microbatches(d, k):
    schedule = check(mixed(d, k * d))
    assert bubble(schedule) == 3 * (d - 2) / 2
    assert peak_activations(schedule).max() == (3 * d - 2) / 2
    assert is_mirrored(schedule)
    if d > 2:
        assert bubble(schedule) < bubble(build("chimera", num_devices=d, num_microbatches=k * d))


@pytest.mark.parametrize("d", [2, 4, 6])
def test_mixpipe_holds_no_more_than_it_may_and_more_pays(d):
    for n in (1, 2, d - 1, d, d + 1, 2 * d, 3 * d - 1, 4 * d):
        makespans = []
        for injected in range(2, (3 * d - 2) // 2 + 1):
            schedule = check(mixed(d, n, injected))
            assert peak_activations(schedule).max() <= injected, (n, injected)
            makespans.append(simulate(schedule).makespan)
        assert makespans == sorted(makespans, reverse=True), n


@pytest.mark.parametrize("d", [4, 6, 8])
def test_mixpipe_at_n_equal_d_is_as_good_as_chimera(d):
    chimera = build("chimera", num_devices=d, num_microbatches=d)
    assert bubble(mixed(d, d)) == bubble(mixed(d, d, d)) == bubble(chimera)


@pytest.mark.parametrize(
    ("injected", "repair"), [(1, 2), (-3, 2), (6, 5), (99, 5), ("most", 5), (True, 5), (2.5, 5), (None, 5)]
)
def test_mixpipe_names_the_nearest_legal_number(injected, repair):
    with pytest.raises(
        ScheduleError, match=rf"(?s)injected={injected!r} .*injected-range: .*repair: set injected={repair},"
    ):
        mixed(4, 8, injected)


def test_mixpipe_and_its_syncs():
    lazy = build("mixpipe", num_devices=4, num_microbatches=8, eager_sync=False)
    assert [action.kind for action in lazy.rows[0][-2:]] == [Kind.SYNC, Kind.SYNC]
    assert [str(action) for action in mixed(4, 8).rows[0] if action.kind is Kind.SYNC] == ["3SYNC@1", "0SYNC"]


# from the closed form at N=D: the last microbatch starts 2(D-1) slots after the first; at more, what is claimed
@pytest.mark.parametrize("waves", [1, 2, 3])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 5, 8])
def test_hanayo(d, waves):
    for k in (1, 2, 4):
        schedule = check(waved(d, k * d, waves))
        assert bubble(schedule, backward=1.0) == 2 * (d - 1), k
        assert bubble(schedule, backward=2.0) == 4 * (d - 1), k
        assert bubble(schedule, backward=3.0) == 6 * (d - 1), k
        assert peak_activations(schedule).max() == d, k


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 7])
def test_hanayo_of_any_number_of_microbatches(d, waves):
    for n in range(1, 3 * d):
        schedule = check(waved(d, n, waves))
        assert peak_activations(schedule).max() == min(d, n)
        assert schedule.placement == zig_zag(d, 2 * waves)


def test_hanayo_has_units_to_fall_back_on(monkeypatch):
    monkeypatch.setattr(importlib.import_module("jaxpipe.schedules.methods.hanayo"), "job_order", lambda *_: None)
    for d, n in ((2, 5), (4, 8), (5, 15)):
        schedule = check(waved(d, n, 2))
        assert peak_activations(schedule).max() == d
    # slots are all taken between the first and the last, so that units cost nothing where slots are equal
    assert bubble(waved(4, 12, 2), backward=1.0) == 2 * (4 - 1)


def test_hanayo_counts_waves():
    with pytest.raises(ScheduleError, match=r"(?s)waves=0 for schedule 'hanayo'.*repair: set waves=1$"):
        waved(4, 8, 0)
