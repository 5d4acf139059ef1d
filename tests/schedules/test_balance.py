"""Balanced schedules keep their bound, transit included, with the fewest transfers, or say why they cannot.

The bound ceil((D+2)/2) is BPipe's (Kim et al., ICML 2023). Numbers of evictions are minima by dynamic
programming, typed in where they are known and found anew for small cases.
"""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from fewest_evictions import fewest_evictions
from uneven_schedules import interleaved, one_f_one_b_with_warm_up, with_split_backward

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    Costs,
    Kind,
    Schedule,
    balance,
    build,
    check,
    peak_activations,
    simulate,
    split_backward,
    stored,
    transfers,
)
from jaxpipe.schedules.schedule import PARKING_KINDS

UNITS = ({"unit": "page"}, {"unit": "microbatch"}, {"unit": "microbatch", "policy": "oldest"})
SMALL = [(d, n) for d in (4, 5, 6, 7, 8) for n in range(1, 4 * d + 1)]
SMALL += [(d, n) for d in (13, 16) for n in (d // 2 + 1, d - 1, d, 2 * d + 1)]
LARGE = [(d, n) for d in (33, 64) for n in (d // 2 + 1, d - 1, d, 2 * d + 1)]
ALL = [(d, n) for d in range(4, 65) for n in (1, d // 2, d // 2 + 1, d // 2 + 2, d - 1, d, d + 1, 2 * d + 1, 4 * d)]
TRANSFERS = (0.0, 0.5, 1.0)  # of one microbatch's parked pages, in forwards: at most the shortest action


def paper_bound(num_devices: int) -> int:
    return math.ceil((num_devices + 2) / 2)


def between_pairs(schedule: Schedule, time: float) -> Costs:
    """Costs of `time` for each EVICT and LOAD of 1F1B, and none for messages."""
    last = schedule.num_devices - 1
    pairs = [(d, last - d) for d in range(last + 1) if abs(last - 2 * d) > 1]  # not those of neighbours
    return Costs(link=dict.fromkeys(pairs, time), slot_messages=1.0)


def most_stored(schedule: Schedule, costs: Costs) -> float:
    return max(device.total.max() for device in stored(simulate(schedule, costs)))


def num_evictions(schedule: Schedule) -> list[int]:
    return [sum(action.kind is Kind.EVICT for action in row) for row in schedule.rows]


def without_moves(schedule: Schedule) -> tuple:
    return tuple(tuple(action for action in row if action.kind not in PARKING_KINDS) for row in schedule.rows)


def assert_bound_is_kept(num_devices: int, num_microbatches: int):
    plain = build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)
    makespan = simulate(plain).makespan
    for options in UNITS:
        schedule = check(build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches, **options))
        assert without_moves(schedule) == plain.rows
        for time in TRANSFERS:
            timeline = simulate(schedule, between_pairs(schedule, time))
            most = max(device.total.max() for device in stored(timeline))
            assert most <= paper_bound(num_devices), (num_devices, num_microbatches, options, time)
            assert timeline.makespan == pytest.approx(makespan), (num_devices, num_microbatches, options, time)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(SMALL, marks=pytest.mark.ci), pytest.param(LARGE, marks=pytest.mark.slow)],
    ids=["small", "large"],
)
def test_no_device_stores_more_than_the_bound_and_no_time_is_lost(sizes):
    for num_devices, num_microbatches in sizes:
        assert_bound_is_kept(num_devices, num_microbatches)


@pytest.mark.slow
def test_no_device_stores_more_than_the_bound_anywhere():
    for num_devices, num_microbatches in ALL:
        assert_bound_is_kept(num_devices, num_microbatches)


def test_the_bound_is_used_to_the_full():
    for num_devices, options in product((4, 5, 8, 9, 16), UNITS):
        schedule = build("bpipe", num_devices=num_devices, num_microbatches=3 * num_devices, **options)
        assert most_stored(schedule, between_pairs(schedule, 1.0)) == paper_bound(num_devices)
        assert peak_activations(schedule).max() == paper_bound(num_devices)


@pytest.mark.parametrize("unit", ["page", "microbatch"])
def test_with_hosts_no_device_stores_more_than_three_and_no_time_is_lost(unit):
    """Copies of up to a forward; every device but the last three parks, each on its own host."""
    for num_devices, num_microbatches in ((4, 9), (5, 15), (8, 32), (9, 20)):
        plain = build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)
        schedule = check(
            build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches, to="host", unit=unit)
        )
        assert without_moves(schedule) == plain.rows
        assert [count > 0 for count in num_evictions(schedule)] == [True] * (num_devices - 3) + [False] * 3
        for copy in (0.0, 0.5, 1.0):
            share = float(max(schedule.parked[: num_devices - 3], default=1))
            costs = Costs(host=copy / share, slot_messages=1.0)
            assert most_stored(schedule, costs) <= 3
            assert simulate(schedule, costs).makespan == pytest.approx(simulate(plain).makespan)


def test_transfers_longer_than_an_action_would_break_the_bound():
    schedule = build("bpipe", num_devices=8, num_microbatches=32)
    assert most_stored(schedule, between_pairs(schedule, 2.5)) > paper_bound(8)


@pytest.mark.parametrize(
    ("num_devices", "num_microbatches", "policy", "overlapped", "evictions"),
    [
        (4, 16, "latest", False, [5]),
        (8, 32, "latest", False, [12, 10, 6]),
        (4, 16, "latest", True, [8]),
        (8, 32, "latest", True, [15, 12, 8]),
        (4, 16, "oldest", False, [14]),
        (8, 32, "oldest", False, [28, 28, 28]),
        (16, 64, "latest", False, [28, 24, 24, 20, 16, 12, 7]),
        (16, 64, "oldest", False, [56] * 7),
    ],
)
def test_evictions_of_whole_microbatches(num_devices, num_microbatches, policy, overlapped, evictions):
    schedule = build(
        "bpipe",
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        unit="microbatch",
        policy=policy,
        overlapped=overlapped,
    )
    assert num_evictions(check(schedule)) == evictions + [0] * (num_devices - len(evictions))
    assert schedule.parked == ()


def test_latest_makes_the_fewest_evictions_there_can_be():
    for num_devices, overlapped in product((4, 5, 6, 7, 8), (False, True)):
        for num_microbatches in (
            *range(paper_bound(num_devices) + 1, num_devices + 3),
            2 * num_devices,
            3 * num_devices - 1,
        ):
            plain = build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)
            bound = paper_bound(num_devices)
            fewest = [fewest_evictions(row, bound, overlapped=overlapped) for row in plain.rows]
            made = {
                policy: num_evictions(balance(plain, unit="microbatch", policy=policy, overlapped=overlapped))
                for policy in ("latest", "oldest")
            }
            assert made["latest"] == fewest, (num_devices, num_microbatches, overlapped)
            assert sum(made["oldest"]) >= sum(fewest)
            if num_microbatches > num_devices + 1:
                assert sum(made["oldest"]) > sum(fewest)


def test_evictions_without_time_keep_the_bound_at_home():
    for num_devices, num_microbatches in ((4, 16), (5, 11), (8, 32)):
        schedule = build(
            "bpipe", num_devices=num_devices, num_microbatches=num_microbatches, unit="microbatch", overlapped=False
        )
        assert most_stored(schedule, between_pairs(schedule, 0.0)) == paper_bound(num_devices)


def test_traffic_by_pages():
    schedule = build("bpipe", num_devices=8, num_microbatches=32)
    # f N with f = (D - s - k) / (D - s - 2) = 1/2, 2/5, 1/4
    assert [str(share) for share in schedule.parked] == ["1/2", "2/5", "1/4", "1", "1", "1", "1", "1"]
    moved = transfers(schedule)
    assert np.ceil(moved.evicted).tolist() == [16, 13, 8, 0, 0, 0, 0, 0]
    assert moved.loaded.tolist() == moved.evicted.tolist()


def test_whole_pages_of_any_microbatches_in_a_row_keep_the_bound():
    for num_devices in (4, 5, 8, 16, 33):
        schedule = build("bpipe", num_devices=num_devices, num_microbatches=2 * num_devices)
        for stage, num_layers in product(range(num_devices // 2 - 1), (1, 2, 3, 4, 10)):
            share, num_others = schedule.parked_of(stage), num_devices - stage - 2
            pages = np.diff([math.floor(i * share * num_layers) for i in range(2 * num_devices + 1)])
            at_once = np.convolve(pages, np.ones(num_others, dtype=int), mode="valid")
            assert (at_once == (num_devices - stage - paper_bound(num_devices)) * num_layers).all()


def test_row_by_pages_is_steady():
    row = " ".join(map(str, build("bpipe", num_devices=8, num_microbatches=32).rows[0]))
    assert "0F15 0EVICT15 0B8 0LOAD9 0F16 0EVICT16 0B9 0LOAD10 0F17 0EVICT17 0B10" in row


@pytest.mark.parametrize("options", UNITS, ids=lambda options: "-".join(options.values()))
def test_other_uneven_schedules(options):
    # peaks of interleaved 1F1B: 2 (D - s - 1) + (v - 1) D + 1
    two_chunks = interleaved(num_devices=4, num_chunks=2, num_microbatches=12)
    assert peak_activations(two_chunks).tolist() == [5.5, 4.5, 3.5, 2.5]
    three_chunks = interleaved(num_devices=8, num_chunks=3, num_microbatches=16)
    steep = one_f_one_b_with_warm_up((11, 6, 3, 0), num_microbatches=20)  # peaks 12, 7, 4, 1
    cases = [(two_chunks, (11 + 5 + 1) / 2), (three_chunks, (31 + 17 + 1) / 2), (steep, (12 + 1 + 1) / 2)]
    for plain, bound in cases:
        schedule = check(balance(plain, **options))
        assert without_moves(schedule) == plain.rows
        assert most_stored(schedule, Costs()) == math.ceil(bound)
        last = schedule.num_devices - 1
        slow = Costs(link={(d, last - d): 1.0 for d in (0, last)}, slot_messages=1.0)
        assert most_stored(schedule, slow) <= math.ceil(bound)


def test_a_bound_above_the_least_moves_less():
    for options in UNITS:
        evicted = [
            transfers(build("bpipe", num_devices=8, num_microbatches=32, bound=bound, **options)).evicted.sum()
            for bound in (5, 6, 7)
        ]
        assert evicted[0] > evicted[1] > evicted[2] > 0
        schedule = build("bpipe", num_devices=8, num_microbatches=32, bound=6, **options)
        assert most_stored(schedule, between_pairs(schedule, 1.0)) == 6


def test_split_backwards_hold_more_whole_microbatches():
    split = with_split_backward(build("1f1b", num_devices=8, num_microbatches=24), num_late=1)
    for options in UNITS:
        schedule = check(balance(split, bound=6, **options))
        assert most_stored(schedule, between_pairs(schedule, 0.5)) <= 6


def test_split_1f1b_keeps_the_bound_of_bpipe_until_weight_gradients():
    for num_devices, options in product((4, 5, 8, 9), UNITS):
        for num_microbatches in (num_devices, 2 * num_devices + 1):
            split = split_backward(build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches))
            schedule = check(balance(split, **options))
            assert without_moves(schedule) == split.rows
            for time in TRANSFERS:  # at most a W
                costs = between_pairs(schedule, time)
                assert most_stored(schedule, costs) == paper_bound(num_devices), (num_devices, options, time)
                assert simulate(schedule, costs).makespan == simulate(split).makespan


def test_weight_gradients_wherever_they_stand_keep_a_bound():
    random, num_kept = np.random.default_rng(0), 0
    plain = [
        build("1f1b", num_devices=8, num_microbatches=17),
        interleaved(num_devices=4, num_chunks=2, num_microbatches=8),
    ]
    for schedule, options, _ in product(plain, UNITS, range(4)):
        rows = []
        for row in with_split_backward(schedule, num_late=0).rows:
            placed, late = [], []
            for action in row:
                (late if action.kind is Kind.W else placed).append(action)
                while late and random.random() < 0.5:
                    placed.append(late.pop(random.integers(len(late))))
            rows.append((*placed, *late))
        split = check(replace(schedule, rows=tuple(rows)))
        most = int(peak_activations(split).max() * split.placement.num_chunks)
        for bound in range(most // 2, most):
            try:
                balanced = check(balance(split, bound=bound, **options))
            except ScheduleError:
                continue
            num_kept += 1
            for time in TRANSFERS:
                assert most_stored(balanced, between_pairs(balanced, time)) <= bound
    assert num_kept > 20


def test_few_microbatches_need_no_transfers():
    for num_devices in (4, 5, 8, 64):
        for num_microbatches in range(1, paper_bound(num_devices) + 1):
            schedule = build("bpipe", num_devices=num_devices, num_microbatches=num_microbatches)
            plain = build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches)
            assert schedule == replace(plain, name="bpipe")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_devices": 2}, "(?s)num_devices=2 .*repair: set num_devices=4 or more"),
        ({"num_devices": 3}, "(?s)num_devices=3 .*repair: set num_devices=4 or more"),
        ({"num_devices": 8, "bound": 4}, "(?s)bound=4 cannot be kept.*repair: set bound=5, the least"),
        ({"num_devices": 8, "bound": 0}, "(?s)bound=0 cannot be kept.*repair: set bound=5, the least"),
        ({"num_devices": 9, "bound": 5}, "(?s)bound=5 cannot be kept.*repair: set bound=6, the least"),
        ({"num_devices": 8, "bound": 8}, "(?s)bound=8 .*repair: set bound=7 or less"),
        ({"num_devices": 8, "unit": "pages"}, "unit='pages' for schedule 'bpipe'. Did you mean 'page'"),
        (
            {"num_devices": 8, "unit": "microbatch", "policy": "last"},
            "policy='last' .* Did you mean 'latest'",
        ),
        ({"num_devices": 8, "policy": "oldest"}, "policy='oldest' has no effect with unit='page'"),
        ({"num_devices": 8, "overlapped": False}, "overlapped=False has no effect with unit='page'"),
        ({"num_devices": 8, "to": "hosts"}, "to='hosts' for schedule 'bpipe'. Did you mean 'host'"),
        ({"num_devices": 8, "to": "host", "bound": 2}, "(?s)bound=2 cannot be kept.*repair: set bound=3, the least"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ScheduleError, match=message) as error:
        build("bpipe", num_microbatches=16, **options)
    assert "\n  rule " in str(error.value)
    assert "\n  repair: " in str(error.value)


@pytest.mark.parametrize("change", [balance, split_backward])
@pytest.mark.parametrize("bound", [4.5, "4"])
def test_a_bound_is_a_whole_number(change, bound):
    with pytest.raises(ScheduleError, match="bound is a whole number"):
        change(build("1f1b", num_devices=4, num_microbatches=8), bound=bound)


def test_options_are_checked_even_where_nothing_moves():
    with pytest.raises(ScheduleError, match="unit='pages' for"):
        build("bpipe", num_devices=8, num_microbatches=1, unit="pages")
    with pytest.raises(ScheduleError, match="unit=1 for"):
        build("bpipe", num_devices=8, num_microbatches=1, unit=1)


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches", "bound", "peaks"),
    [
        ("gpipe", 4, 6, 7, "6 6 6 6"),  # nobody has room
        ("1f1b", 2, 6, 2, "2 1"),  # transit eats the saving
        ("1f1b", 3, 6, 3, "3 2 1"),
        ("1f1b", 8, 5, 5, "5 5 5 5 4 3 2 1"),
    ],
)
def test_nothing_to_balance(name, num_devices, num_microbatches, bound, peaks):
    plain = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    with pytest.raises(ScheduleError) as error:
        balance(plain)
    text = str(error.value)
    assert text.startswith(f"nothing to balance in '{name}' ")
    assert f"bound={bound} slots" in text
    assert f"slots        {peaks}\n" in text


def test_a_balanced_or_illegal_schedule_is_refused():
    schedule = build("bpipe", num_devices=4, num_microbatches=8)
    with pytest.raises(ScheduleError, match="has EVICT and LOAD actions already"):
        balance(schedule)
    illegal = replace(schedule, rows=(schedule.rows[0][:-1], *schedule.rows[1:]))
    with pytest.raises(ScheduleError, match="0B7 is missing"):
        balance(illegal)
