"""List scheduling of whole backwards: a free machine runs the ready operation of least key.

A job is a microbatch's path over the machines: forward over all stages, and back. A machine is a device; for two
mirrored replicas it is a pair of devices that do the same at the same time in opposite directions, and a job is a
microbatch of each. Goes in: the machine of each stage, and the preferences of machines. Comes out: an order for each
machine, and from it the rows of devices. Left to the methods: good preferences. A forward takes 1, a backward 2, a
message nothing.

`list_scheduler` instead keeps a memory bound by looking ahead and takes any times. Here a cap is one of the
preferences, counts on the first operations of a job only, and may stop all machines; the orders of Hanayo, MixPipe and
BitPipe's early forwarding depend on that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from jaxpipe.schedules.ordering.flow_shop import operations_of
from jaxpipe.schedules.passes.rows import drop_padding
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Action, Kind, Rows

FORWARD = 1  # duration, the unit of time here
BACKWARD = 2  # duration
UNLIMITED = sys.maxsize
_SHIFT = 40  # bits for job * K + operation below a key, so that a heap compares single integers


class Preference(NamedTuple):
    """The preferences of a free machine: priorities of operations, and a cap that makes it wait.

    The key of an operation is the time at which it would start if its job started as planned here and never waited.
    """

    spacing: int  # time from the start of a job to that of the next one
    pace: int  # time of a backward in keys
    delay: int  # time added to the keys of backwards; if negative, they go first
    # forwards that a machine may hold, not yet freed by their backwards, when it starts another one of the first
    # `num_capped` operations of a job
    cap: int
    num_capped: int  # number of operations of a job that the cap applies to
    group: int = UNLIMITED  # number of jobs that start `spacing` apart; all by default
    group_spacing: int = 0  # time from the start of a group to that of the next one


class JobOrder(NamedTuple):
    """An order of all jobs' operations on each machine."""

    idle: int  # time that a machine does nothing between the start and the end of all jobs
    most_held: int  # the most forwards that a machine holds at once
    # [machine][position] -> job * K + operation, for the K = 2S operations of a job over S stages
    rows: list[list[int]]
    preference: Preference  # the preference that led to this order


def job_order(
    machine_of: Sequence[int],
    num_jobs: int,
    preference: Preference,
    *,
    most_idle: int = UNLIMITED,
    most_held: int = UNLIMITED,
) -> JobOrder | None:
    """Returns the order in which machines that never wait for a better operation run all jobs.

    Args:
        machine_of: [stage] -> machine. Every machine has equally many stages.
        num_jobs: number of jobs, all over the same machines.
        preference: preference of the machines.
        most_idle: largest idle time of a machine that is accepted.
        most_held: largest number of forwards on a machine that is accepted.

    Returns:
        The order, or None if it would exceed `most_idle` or `most_held`, or if caps deadlock it: each machine
        would need the backwards of another to free its forwards.

    Example:
        Two machines, two jobs of operations 0F 1F 1B 0B, numbered 0..3 and 4..7; keys 0 1 1 3 and 3 4 4 6:

            time       0  1  2  3  4  5  6  7  8
            machine 0  0  4  .  .  3  3  .  7  7   F F B B: at 1, 4 is ready and 3 is not
            machine 1  .  1  2  2  5  6  6         F B F B: at 2, the key of 2 is less than that of 5

        >>> order = job_order((0, 1), 2, Preference(spacing=3, pace=2, delay=-1, cap=2, num_capped=1))
        >>> order.rows, order.idle  # 1F1B
        ([[0, 4, 3, 7], [1, 2, 5, 6]], 3)
    """
    num_capped = preference.num_capped
    cap = preference.cap
    starts = [
        preference.spacing * (job % preference.group) + preference.group_spacing * (job // preference.group)
        for job in range(num_jobs)
    ]
    num_stages = len(machine_of)
    num_operations = 2 * len(machine_of)
    runs_on = (*machine_of, *reversed(machine_of))  # [operation] -> machine
    planned = (  # [operation] -> time after the start of its job
        *range(num_stages),
        *(num_stages + preference.pace * stage + preference.delay for stage in range(num_stages)),
    )
    machines = range(max(machine_of) + 1)
    rows: list[list[int]] = [[] for _ in machines]
    # Heaps of (key, index) of ready operations; those under the cap have their own heap, which the cap may hold back.
    ready: list[list[int]] = [[] for _ in machines]
    ready_capped: list[list[int]] = [[] for _ in machines]
    held = [0 for _ in machines]
    worked = [0 for _ in machines]
    free_at = [0 for _ in machines]
    # Three lists do: what starts now ends in one step or in two.
    ending: tuple[list[int], ...] = ([], [], [])  # by time, modulo one more than the longest operation
    mask = (1 << _SHIFT) - 1

    def make_ready(index: int) -> None:
        job, operation = divmod(index, num_operations)
        heap = (ready_capped if operation < num_capped else ready)[runs_on[operation]]
        heappush(heap, (starts[job] + planned[operation] << _SHIFT) + index)

    make_ready(0)
    num_left = num_operations * num_jobs
    num_running = 0
    time = 0
    peak = 0
    while num_left:
        # Operations that end now: backwards free a forward, and the next operation of the job becomes ready.
        ended = ending[time % 3]
        for index in ended:
            operation = index % num_operations
            # Backwards are the second half of a job's operations.
            if operation >= num_stages:
                held[runs_on[operation]] -= 1
            if operation + 1 < num_operations:
                make_ready(index + 1)
        num_running -= len(ended)
        ended.clear()
        # Operations that start now: the least key of each free machine.
        for machine in machines:
            if free_at[machine] > time:
                continue
            heap = ready[machine]
            capped = ready_capped[machine]
            if capped and held[machine] < cap and (not heap or capped[0] < heap[0]):
                heap = capped
            if not heap:
                continue
            # Idle time only grows, so an order that has too much of it is given up at once.
            if time - worked[machine] > most_idle:
                return None
            index = heappop(heap) & mask
            job, operation = divmod(index, num_operations)
            if operation < num_stages:
                duration = FORWARD
                held[machine] += 1
                peak = max(peak, held[machine])
                # Jobs start in order, each when the one before it has begun.
                if operation == 0 and job + 1 < num_jobs:
                    make_ready(index + num_operations)
            else:
                duration = BACKWARD
            rows[machine].append(index)
            worked[machine] += duration
            free_at[machine] = time + duration
            ending[free_at[machine] % 3].append(index)
            num_left -= 1
            num_running += 1
        # Nothing runs and nothing has started, so nothing ever will: caps hold up all machines.
        if not num_running or peak > most_held:
            return None
        time += 1
    # All machines have the same work, so the first one's idle time is that of each.
    idle = max(free_at) - worked[0]
    return JobOrder(idle, peak, rows, preference) if idle <= most_idle else None


def best_job_order(
    machine_of: Sequence[int],
    num_jobs: int,
    preferences: Iterable[Preference],
    *,
    least_idle: int = 0,
    most_held: int = UNLIMITED,
) -> JobOrder | None:
    """The order with the least idle time, then the least `most_held`; of several the first.

    Returns:
        The order, or None if no preference leads to one.
    """
    best: JobOrder | None = None
    for preference in preferences:
        if best is None:
            idle = UNLIMITED
            held = most_held
        # Still too much idle time: a shorter order may hold as much as is allowed.
        elif best.idle > least_idle:
            idle = best.idle
            held = most_held
        else:
            idle = best.idle
            held = best.most_held - 1
        order = job_order(machine_of, num_jobs, preference, most_idle=idle, most_held=held)
        if order and (best is None or order[:2] < best[:2]):
            best = order
    return best


# ---- Between machines and devices


def machines_of(placement: Placement) -> tuple[int, ...]:
    """[stage] -> the machine that runs it: its device or, in a mirrored pair of devices, the lower one.

    Example:
        >>> from jaxpipe.schedules.placement import bidirectional, linear
        >>> machines_of(linear(4)), machines_of(bidirectional(linear(4)))
        ((0, 1, 2, 3), (0, 1, 1, 0))
    """
    if placement.num_replicas == 1:
        return placement.devices[0]
    return tuple(min(device, placement.partner_of(device)) for device in placement.devices[0])


def num_jobs_of(placement: Placement, num_microbatches: int) -> int:
    """The number of jobs for `num_microbatches`; with two replicas, enough for the direction that has more."""
    # Rounded up; what the other direction has too many is dropped as padding.
    return -(-num_microbatches // placement.num_replicas)


def rows_of_jobs(order: Sequence[Sequence[int]], placement: Placement, *, num_microbatches: int) -> Rows:
    """The rows of all devices.

    With two replicas, each D consecutive microbatches are divided in halves: the first half goes down (replica 0); of
    an odd number, the last direction has one less.

    Returns:
        [device][position] -> F or B.
    """
    number = _microbatch_numbers(placement, num_jobs_of(placement, num_microbatches))
    operations = operations_of(placement.num_stages, (Kind.B,))
    rows = []
    for device in range(placement.num_devices):
        machine = min(device, placement.partner_of(device)) if placement.num_replicas == 2 else device
        # A machine of two devices: the device that holds the stage in replica 0 runs that one, the other its mirror.
        replica_of = [int(holder != device) for holder in placement.devices[0]]
        row = []
        for index in order[machine]:
            job, operation = divmod(index, len(operations))
            kind, stage = operations[operation]
            replica = replica_of[stage]
            row.append(Action(kind, stage, number[replica][job], replica))
        rows.append(tuple(row))
    return drop_padding(rows, num_microbatches=num_microbatches)


def _microbatch_numbers(placement: Placement, num_jobs: int) -> tuple[list[int], ...]:
    """[replica][job] -> microbatch."""
    if placement.num_replicas == 1:
        return (list(range(num_jobs)),)
    half = placement.num_devices // 2
    numbers: tuple[list[int], ...] = ([], [])
    for first in range(0, num_jobs, half):
        # The last group may be shorter, with as many jobs in either direction.
        length = min(half, num_jobs - first)
        for replica in (0, 1):
            numbers[replica].extend(range(2 * first + replica * length, 2 * first + (replica + 1) * length))
    return numbers
