"""The list scheduler against one that looks at every operation at any time, and its figures against the simulator."""

import random

import pytest

from jaxpipe.schedules import Placement, Schedule, bidirectional, check, linear, peak_activations, simulate, zig_zag
from jaxpipe.schedules.ordering.whole_backwards import (
    JobOrder,
    Preference,
    best_job_order,
    job_order,
    machines_of,
    num_jobs_of,
    rows_of_jobs,
)


def every_step_at_every_moment(machine_of: tuple[int, ...], num_jobs: int, preference: Preference) -> list[list[int]]:
    """Rows as `job_order` gives them, without heaps: each free machine takes the least key of all operations."""
    num_forwards, num_operations = len(machine_of), 2 * len(machine_of)
    runs_on = machine_of + machine_of[::-1]
    machines = range(max(machine_of) + 1)
    rows = [[] for _ in machines]
    ends = {}  # (job, operation) -> time
    busy_until = [0 for _ in machines]

    def key(job: int, operation: int) -> int:
        group, place = divmod(job, preference.group)
        start = group * preference.group_spacing + place * preference.spacing
        backwards = operation - num_forwards
        return start + (operation if backwards < 0 else num_forwards + preference.pace * backwards + preference.delay)

    for time in range(3 * num_operations * num_jobs):
        done = {operation for operation, end in ends.items() if end <= time}
        for machine in machines:
            if busy_until[machine] > time:
                continue
            own = [(job, operation) for job, operation in ends if runs_on[operation] == machine]
            held = sum(
                operation < num_forwards and (job, num_operations - 1 - operation) not in done for job, operation in own
            )
            candidates = [
                (key(job, operation), job, operation)
                for job in range(num_jobs)
                for operation in range(num_operations)
                if runs_on[operation] == machine
                and (job, operation) not in ends
                and (operation == 0 or (job, operation - 1) in done)
                and (operation >= preference.num_capped or held < preference.cap)
            ]
            if candidates:
                _, job, operation = min(candidates)
                busy_until[machine] = ends[job, operation] = time + (1 if operation < num_forwards else 2)
                rows[machine].append(job * num_operations + operation)
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
        rows = every_step_at_every_moment(machines_of(placement), 4, preference)
        order = job_order(machines_of(placement), 4, preference)
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
        order = job_order(machines_of(placement), num_jobs_of(placement, num_microbatches), preference)
        if order:
            rows = rows_of_jobs(order.rows, placement, num_microbatches=num_microbatches)
            schedule = check(Schedule("listed", placement, num_microbatches, rows))
            work = 3 * placement.num_chunks * num_microbatches
            assert simulate(schedule).makespan == work + order.idle
            assert peak_activations(schedule).max() * placement.num_chunks == order.most_held


def test_caps_that_stop_everything():
    # the job stands twice on machine 1, which may hold one forward: the second one waits for the first one's backward
    preference = Preference(spacing=1, pace=1, delay=0, cap=1, num_capped=4)
    assert job_order((0, 1, 1, 0), 1, preference) is None
    assert job_order((0, 1, 1, 0), 1, preference._replace(num_capped=2)) is not None


def test_an_order_beyond_its_limits_is_none():
    preference = Preference(spacing=3, pace=2, delay=-1, cap=4, num_capped=1)
    order = job_order((0, 1, 2, 3), 8, preference)
    assert isinstance(order, JobOrder)
    assert (order.idle, order.most_held) == (9, 4)  # 1F1B: D-1 forwards and backwards, D microbatches
    assert job_order((0, 1, 2, 3), 8, preference, most_idle=9, most_held=4) == order
    assert job_order((0, 1, 2, 3), 8, preference, most_idle=8) is None
    assert job_order((0, 1, 2, 3), 8, preference, most_held=3) is None


@pytest.mark.parametrize(("least_idle", "most_held"), [(0, 99), (6, 99), (6, 10), (6, 3)])
def test_the_best_order_is_the_best_of_all(least_idle, most_held):
    machine_of = machines_of(bidirectional(linear(6)))
    preferences = [
        Preference(spacing, pace, delay, cap, num_capped)
        for spacing in (1, 3)
        for pace in (1, 2)
        for delay in (-2, 1)
        for cap in (2, 5, 7, 8)
        for num_capped in (1, 3, 6)
    ]
    found = [order for each in preferences if (order := job_order(machine_of, 12, each)) is not None]
    best = min((order for order in found if order.most_held <= most_held), key=lambda order: order[:2])
    assert best_job_order(machine_of, 12, preferences, least_idle=least_idle, most_held=most_held) == best


def test_no_preference_leads_to_an_order():
    assert best_job_order((0,), 2, [Preference(1, 1, 0, cap=1, num_capped=1)], most_held=0) is None


def test_microbatches_of_two_directions():
    order = job_order(machines_of(bidirectional(linear(4))), 5, Preference(3, 2, 0, cap=5, num_capped=4))
    assert order
    rows = rows_of_jobs(order.rows, bidirectional(linear(4)), num_microbatches=9)
    replica_of = {action.microbatch: action.replica for row in rows for action in row}
    assert [replica_of[microbatch] for microbatch in range(9)] == [0, 0, 1, 1, 0, 0, 1, 1, 0]
