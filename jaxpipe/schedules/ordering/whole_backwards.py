"""List scheduling of chains: a free worker takes, of the steps that are ready, the one with the least key.

A chain is one microbatch's way over the workers: forward along a route, and back. A worker is a device or, where
two mirrored replicas run, a pair of devices that do the same at the same time in opposite directions, so that one
chain stands for a microbatch of either. Goes in: a route and what workers prefer. Comes out: an order for each
worker. Which preferences are good, the generators say. Times are in forwards of a stage: a forward takes 1, a
backward 2, a message nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from jaxpipe.schedules.ordering.flow_shop import steps_of
from jaxpipe.schedules.passes.rows import Rows, without_phantoms
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Action, Kind

FORWARD, BACKWARD = 1, 2  # durations
UNLIMITED = sys.maxsize
_CHAIN_SHIFT = 40  # room for chain * steps + step below a key


class Preference(NamedTuple):
    """What a free worker prefers, and when it would rather wait.

    The key of a step is the time at which it would start if its chain started when this says, and never waited.

    Attributes:
        spacing: from the start of a chain to that of the next one.
        pace: what a backward takes in keys.
        delay: added to the keys of backwards; below 0 they go first.
        cap: forwards that a worker may hold, not yet given back by their backwards, when it starts another one of
            the first `num_capped` steps of a chain.
        num_capped: see `cap`.
        group: chains that start `spacing` apart; all by default.
        group_spacing: from the start of a group to that of the next one.
    """

    spacing: int
    pace: int
    delay: int
    cap: int
    num_capped: int
    group: int = UNLIMITED
    group_spacing: int = 0


class Order(NamedTuple):
    """What `list_schedule` finds.

    Attributes:
        idle: time between the start and the end of all in which a worker does nothing.
        most_held: the most forwards that a worker holds at once.
        rows: [worker][position] -> chain * steps + step, of the 2 L steps of a chain whose route has L.
        preference: that led to it.
    """

    idle: int
    most_held: int
    rows: list[list[int]]
    preference: Preference


def list_schedule(
    route: Sequence[int],
    num_chains: int,
    preference: Preference,
    *,
    most_idle: int = UNLIMITED,
    most_held: int = UNLIMITED,
) -> Order | None:
    """Returns the order in which workers that never wait for a better step run all chains.

    Args:
        route: [step] -> worker of the forwards of a chain; its backwards go the same way back. Every worker has
            equally many.
        num_chains: that all take this route.
        preference: of the workers.
        most_idle: idle time of a worker with which the order would be of no use.
        most_held: forwards held by a worker, likewise.

    Returns:
        The order, or None if it would exceed `most_idle` or `most_held`, or if caps stop it: workers that may start
        nothing hold what only each other's backwards would give back.

    Example:
        >>> order = list_schedule((0, 1), 2, Preference(spacing=3, pace=2, delay=-1, cap=2, num_capped=1))
        >>> order.rows, order.idle  # F F B B and F B F B: 1F1B
        ([[0, 4, 3, 7], [1, 2, 5, 6]], 3)
    """
    num_capped, cap = preference.num_capped, preference.cap
    starts = [
        preference.spacing * (chain % preference.group) + preference.group_spacing * (chain // preference.group)
        for chain in range(num_chains)
    ]
    num_forwards, num_steps = len(route), 2 * len(route)
    worker_of = (*route, *reversed(route))
    along = (
        *range(num_forwards),
        *(num_forwards + preference.pace * step + preference.delay for step in range(num_forwards)),
    )
    workers = range(max(route) + 1)
    rows: list[list[int]] = [[] for _ in workers]
    ready: list[list[int]] = [[] for _ in workers]  # heaps of key and step; the capped ones apart
    ready_capped: list[list[int]] = [[] for _ in workers]
    held, worked, free_at = [0 for _ in workers], [0 for _ in workers], [0 for _ in workers]
    ending: tuple[list[int], ...] = ([], [], [])  # by time, modulo one more than the longest step
    mask = (1 << _CHAIN_SHIFT) - 1

    def make_ready(index: int) -> None:
        chain, step = divmod(index, num_steps)
        heap = (ready_capped if step < num_capped else ready)[worker_of[step]]
        heappush(heap, (starts[chain] + along[step] << _CHAIN_SHIFT) + index)

    make_ready(0)
    num_left, num_running, time, peak = num_steps * num_chains, 0, 0, 0
    while num_left:
        ended = ending[time % 3]
        for index in ended:
            step = index % num_steps
            if step >= num_forwards:
                held[worker_of[step]] -= 1
            if step + 1 < num_steps:
                make_ready(index + 1)
        num_running -= len(ended)
        ended.clear()
        for worker in workers:
            if free_at[worker] > time:
                continue
            heap, capped = ready[worker], ready_capped[worker]
            if capped and held[worker] < cap and (not heap or capped[0] < heap[0]):
                heap = capped
            if not heap:
                continue
            if time - worked[worker] > most_idle:
                return None
            index = heappop(heap) & mask
            chain, step = divmod(index, num_steps)
            if step < num_forwards:
                duration = FORWARD
                held[worker] += 1
                peak = max(peak, held[worker])
                if step == 0 and chain + 1 < num_chains:
                    make_ready(index + num_steps)
            else:
                duration = BACKWARD
            rows[worker].append(index)
            worked[worker] += duration
            free_at[worker] = time + duration
            ending[free_at[worker] % 3].append(index)
            num_left -= 1
            num_running += 1
        if not num_running or peak > most_held:
            return None
        time += 1
    idle = max(free_at) - worked[0]
    return Order(idle, peak, rows, preference) if idle <= most_idle else None


def best_order(
    route: Sequence[int],
    num_chains: int,
    preferences: Iterable[Preference],
    *,
    least_idle: int = 0,
    most_held: int = UNLIMITED,
) -> Order | None:
    """The order with the least idle time and, of these, the least that is held; the first one if there are several.

    Args:
        route, num_chains: as `list_schedule` takes them.
        preferences: to try, in this order.
        least_idle: of any order there is; as soon as one is found that has it, only less held counts.
        most_held: forwards that a worker may hold.

    Returns:
        The order, or None if no preference leads to one.
    """
    best: Order | None = None
    for preference in preferences:
        if best is None:
            idle, held = UNLIMITED, most_held
        elif best.idle > least_idle:
            idle, held = best.idle, most_held
        else:
            idle, held = best.idle, best.most_held - 1
        found = list_schedule(route, num_chains, preference, most_idle=idle, most_held=held)
        if found and (best is None or found[:2] < best[:2]):
            best = found
    return best


# Microbatches on workers, as above, and actions on devices: from one to the other.
#
# With one replica a worker is a device and a chain a microbatch. With two mirrored ones a worker is the pair of
# devices d and D-1-d, and chain i is the i-th microbatch of either direction: what one device does for replica 0,
# its partner does at the same time for replica 1.


def route_of(placement: Placement) -> tuple[int, ...]:
    """[stage] -> the worker that holds it: its device or, of a pair, the lower one.

    Example:
        >>> from jaxpipe.schedules.placement import bidirectional, linear
        >>> route_of(linear(4)), route_of(bidirectional(linear(4)))
        ((0, 1, 2, 3), (0, 1, 1, 0))
    """
    if placement.num_replicas == 1:
        return placement.devices[0]
    return tuple(min(device, placement.partner_of(device)) for device in placement.devices[0])


def num_chains(placement: Placement, num_microbatches: int) -> int:
    """Chains for that many microbatches: of two replicas, enough for the direction that has more."""
    return -(-num_microbatches // placement.num_replicas)


def rows_of(order: Sequence[Sequence[int]], placement: Placement, *, num_microbatches: int) -> Rows:
    """The rows of all devices.

    Of two replicas, each D microbatches in a row are half and half: the first go down (replica 0); of an odd number,
    the last direction has one less.

    Args:
        order: [worker][position] -> chain * steps + step, numbered as in `shop` with whole backwards.
        placement: of one replica, or of two mirrored ones.
        num_microbatches: of one step.

    Returns:
        [device][position] -> F or B.
    """
    number = _microbatch_numbers(placement, num_chains(placement, num_microbatches))
    steps = steps_of(placement.num_stages, (Kind.B,))
    rows = []
    for device in range(placement.num_devices):
        worker = min(device, placement.partner_of(device)) if placement.num_replicas == 2 else device
        replica_of = [int(holder != device) for holder in placement.devices[0]]
        row = []
        for index in order[worker]:
            chain, step = divmod(index, len(steps))
            kind, stage = steps[step]
            replica = replica_of[stage]
            row.append(Action(kind, stage, number[replica][chain], replica))
        rows.append(tuple(row))
    return without_phantoms(rows, num_microbatches=num_microbatches)


def _microbatch_numbers(placement: Placement, num_chains: int) -> tuple[list[int], ...]:
    """[replica][chain] -> microbatch."""
    if placement.num_replicas == 1:
        return (list(range(num_chains)),)
    half = placement.num_devices // 2
    numbers: tuple[list[int], ...] = ([], [])
    for first in range(0, num_chains, half):
        length = min(half, num_chains - first)
        for replica in (0, 1):
            numbers[replica].extend(range(2 * first + replica * length, 2 * first + (replica + 1) * length))
    return numbers
