"""The list scheduler against one that looks at every step at every moment, and its figures against the simulator."""

import random

import pytest

from jaxpipe.schedules import Placement, Schedule, bidirectional, check, linear, peak_activations, simulate, zig_zag
from jaxpipe.schedules.ordering.whole_backwards import (
    Order,
    Preference,
    best_order,
    list_schedule,
    num_chains,
    route_of,
    rows_of,
)


def every_step_at_every_moment(route: tuple[int, ...], num_chains: int, preference: Preference) -> list[list[int]]:
    """Rows as `list_schedule` gives them, without heaps: each free worker takes the least key of all steps."""
    num_forwards, num_steps = len(route), 2 * len(route)
    worker_of = route + route[::-1]
    workers = range(max(route) + 1)
    rows = [[] for _ in workers]
    ends = {}  # (chain, step) -> time
    busy_until = [0 for _ in workers]

    def key(chain: int, step: int) -> int:
        group, place = divmod(chain, preference.group)
        start = group * preference.group_spacing + place * preference.spacing
        backwards = step - num_forwards
        return start + (step if backwards < 0 else num_forwards + preference.pace * backwards + preference.delay)

    for time in range(3 * num_steps * num_chains):
        done = {step for step, end in ends.items() if end <= time}
        for worker in workers:
            if busy_until[worker] > time:
                continue
            own = [(chain, step) for chain, step in ends if worker_of[step] == worker]
            held = sum(step < num_forwards and (chain, num_steps - 1 - step) not in done for chain, step in own)
            candidates = [
                (key(chain, step), chain, step)
                for chain in range(num_chains)
                for step in range(num_steps)
                if worker_of[step] == worker
                and (chain, step) not in ends
                and (step == 0 or (chain, step - 1) in done)
                and (step >= preference.num_capped or held < preference.cap)
            ]
            if candidates:
                _, chain, step = min(candidates)
                busy_until[worker] = ends[chain, step] = time + (1 if step < num_forwards else 2)
                rows[worker].append(chain * num_steps + step)
    return rows


def random_case(source: random.Random) -> tuple[Placement, Preference]:
    num_devices, num_chunks = source.choice([(2, 1), (2, 2), (4, 1), (4, 2), (3, 2), (3, 1)])
    placement = zig_zag(num_devices, num_chunks)
    if num_devices % 2 == 0 and source.random() < 0.7:
        placement = bidirectional(placement)
    num_stages = placement.num_stages
    return placement, Preference(
        spacing=source.randint(0, 4),
        pace=source.randint(1, 2),
        delay=source.randint(-4, 2),
        cap=source.randint(1, 2 * num_stages),
        num_capped=source.randint(0, num_stages),
        group=source.choice([num_devices, 1000]),
        group_spacing=source.randint(4, 12) * num_devices,
    )


def test_rows_are_those_of_looking_at_every_step():
    source = random.Random(0)
    num_stopped = 0
    for _ in range(60):
        placement, preference = random_case(source)
        rows = every_step_at_every_moment(route_of(placement), 4, preference)
        order = list_schedule(route_of(placement), 4, preference)
        if order is None:
            num_stopped += 1
            assert sum(map(len, rows)) < 4 * 2 * placement.num_stages
        else:
            assert order.rows == rows
    assert 0 < num_stopped < 30


def test_idle_time_and_what_is_held_are_those_of_the_simulator():
    source = random.Random(1)
    for _ in range(60):
        placement, preference = random_case(source)
        num_microbatches = 6 * placement.num_replicas
        order = list_schedule(route_of(placement), num_chains(placement, num_microbatches), preference)
        if order:
            rows = rows_of(order.rows, placement, num_microbatches=num_microbatches)
            schedule = check(Schedule("listed", placement, num_microbatches, rows))
            work = 3 * placement.num_chunks * num_microbatches
            assert simulate(schedule).makespan == work + order.idle
            assert peak_activations(schedule).max() * placement.num_chunks == order.most_held


def test_caps_that_stop_everything():
    # the chain stands twice on worker 1, which may hold one forward: the second one waits for the first one's backward
    preference = Preference(spacing=1, pace=1, delay=0, cap=1, num_capped=4)
    assert list_schedule((0, 1, 1, 0), 1, preference) is None
    assert list_schedule((0, 1, 1, 0), 1, preference._replace(num_capped=2)) is not None


def test_an_order_beyond_its_limits_is_none():
    preference = Preference(spacing=3, pace=2, delay=-1, cap=4, num_capped=1)
    order = list_schedule((0, 1, 2, 3), 8, preference)
    assert isinstance(order, Order)
    assert (order.idle, order.most_held) == (9, 4)  # 1F1B: D-1 forwards and backwards, D microbatches
    assert list_schedule((0, 1, 2, 3), 8, preference, most_idle=9, most_held=4) == order
    assert list_schedule((0, 1, 2, 3), 8, preference, most_idle=8) is None
    assert list_schedule((0, 1, 2, 3), 8, preference, most_held=3) is None


@pytest.mark.parametrize(("least_idle", "most_held"), [(0, 99), (6, 99), (6, 10), (6, 3)])
def test_the_best_order_is_the_best_of_all(least_idle, most_held):
    route = route_of(bidirectional(linear(6)))
    preferences = [
        Preference(spacing, pace, delay, cap, num_capped)
        for spacing in (1, 3)
        for pace in (1, 2)
        for delay in (-2, 1)
        for cap in (2, 5, 7, 8)
        for num_capped in (1, 3, 6)
    ]
    found = [order for each in preferences if (order := list_schedule(route, 12, each)) is not None]
    best = min((order for order in found if order.most_held <= most_held), key=lambda order: order[:2])
    assert best_order(route, 12, preferences, least_idle=least_idle, most_held=most_held) == best


def test_no_preference_leads_to_an_order():
    assert best_order((0,), 2, [Preference(1, 1, 0, cap=1, num_capped=1)], most_held=0) is None


def test_microbatches_of_two_directions():
    order = list_schedule(route_of(bidirectional(linear(4))), 5, Preference(3, 2, 0, cap=5, num_capped=4))
    assert order
    rows = rows_of(order.rows, bidirectional(linear(4)), num_microbatches=9)
    replica_of = {action.microbatch: action.replica for row in rows for action in row}
    assert [replica_of[microbatch] for microbatch in range(9)] == [0, 0, 1, 1, 0, 0, 1, 1, 0]
