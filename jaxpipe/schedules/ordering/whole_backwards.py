"""List scheduling of whole backwards: a free machine runs the ready operation of least key.

A job is a microbatch's path over the machines: forward over all stages, and back. A machine is a device; for two
mirrored replicas it is a pair of devices that do the same at the same time in opposite directions, and a job is a
microbatch of each. Goes in: the machine of each stage, and the preferences of machines. Comes out: an order for each
machine, and from it the rows of devices. Left to the methods: good preferences. A forward takes 1, a backward 2, a
message nothing.

A cap is one of the preferences, in place of the memory bound for which `list_scheduler` looks ahead: it counts on the
first operations of a job only, and may stop all machines; the orders of Hanayo, MixPipe and BitPipe's early forwarding
depend on that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.ordering.flow_shop import FlowShop, flow_shop, operations_of
from jaxpipe.schedules.ordering.list_scheduler import Guide, list_schedule
from jaxpipe.schedules.ordering.problem import StorageSizes
from jaxpipe.schedules.passes.rows import drop_padding
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Action, Kind, Rows

UNLIMITED = sys.maxsize


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
    num_stages = len(machine_of)
    starts = [
        preference.spacing * (job % preference.group) + preference.group_spacing * (job // preference.group)
        for job in range(num_jobs)
    ]
    planned = (  # [operation] -> time after the start of its job
        *range(num_stages),
        *(num_stages + preference.pace * stage + preference.delay for stage in range(num_stages)),
    )
    keys = [start + at for start in starts for at in planned]
    shop = _shop(tuple(machine_of), num_jobs)
    # All machines have the same work, so the first one's idle time is that of each.
    work = shop.work[0]
    guide = Guide(keys, [0] * num_jobs, cap=preference.cap, num_capped=preference.num_capped)
    # + 1: the scheduler gives up an order that is as long as its limit.
    order = list_schedule(shop, guide, work + most_idle + 1)
    if order is None:
        return None
    # A backward frees a forward on its machine, which does nothing else until then.
    takes = [1] * num_stages + [-1] * num_stages
    held = max(max(accumulate(takes[index % len(takes)] for index in row)) for row in order.rows)
    return JobOrder(order.makespan - work, held, order.rows, preference) if held <= most_held else None


@lru_cache(maxsize=8)  # preferences are compared on the same jobs
def _shop(machine_of: tuple[int, ...], num_jobs: int) -> FlowShop:
    """The jobs as a flow shop of whole backwards, in which memory holds up nothing."""
    placement = Placement(max(machine_of) + 1, (machine_of,))
    room = StorageSizes(len(machine_of) * num_jobs)
    return flow_shop(placement, num_jobs, Costs(backward=2.0), room, is_split=False, ticks_per_unit=1.0)


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
        if best and num_jobs == 1:  # which has one order
            break
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
