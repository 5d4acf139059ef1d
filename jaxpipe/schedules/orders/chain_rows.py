"""Chains on workers, as the list scheduler has them, and actions on devices: from one to the other.

With one replica a worker is a device and a chain a microbatch. With two, which are mirrored, a worker is a pair of
devices d and D-1-d, and chain i stands for the i-th microbatch of either direction: what one device does for
replica 0, its partner does at the same time for replica 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedules.action import Action, Kind
from jaxpipe.schedules.orders.shop import steps_of
from jaxpipe.schedules.phantoms import Rows, without_phantoms
from jaxpipe.schedules.placement import Placement


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
