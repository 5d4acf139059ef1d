"""Building blocks: one microbatch's way over the devices, repeated for every microbatch.

Goes in: a block, the slot of each F and I of a microbatch, at most one action in a slot of a device. Comes out: when
all actions start, W where a device has a slot left, first in first out. In time slots all of which are as long:
what comes of it at other times, `justification` makes good.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362); the offsets of V-Min
and V-Half as in their repository, github.com/sail-sg/zero-bubble; those of ZB-V ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxpipe.schedules.orders.shop import Shop

INTERVAL = 6  # slots from one microbatch to the next: F, I and W of two stages


def v_min_block(num_devices: int) -> list[int]:
    """[step] -> slot of F and I of a V; from device to device without a wait.

    Where D modulo 3 is 0 it waits two slots before the first I, as published; where that is 2 two at each turn, ours:
    at F=I=W as good as no wait, which is published, and better where I is longer than W.

    Example:
        >>> v_min_block(2)
        [0, 1, 4, 5, 8, 9, 12, 13]
    """
    return _block(num_devices, outward=1, back=1, waits=((0, 2, 0), (0, 0, 0), (2, 2, 2))[num_devices % 3])


def v_half_block(num_devices: int) -> list[int]:
    """[step] -> slot of F and I of a V; outward every second slot, and for even D three slots before the first I.

    Example:
        >>> v_half_block(2)
        [0, 2, 3, 4, 8, 10, 12, 13]
    """
    return _block(num_devices, outward=2, back=1, waits=(0, 0 if num_devices % 2 else 3, 1))


def zb_v_block(num_devices: int) -> list[int]:
    """[step] -> slot of F and I of a V; outward every fourth slot, back every second one.

    Example:
        >>> zb_v_block(2)
        [0, 4, 5, 7, 8, 12, 13, 15]
    """
    return _block(num_devices, outward=4, back=2, waits=(0, 0, 0))


def _block(num_devices: int, *, outward: int, back: int, waits: tuple[int, int, int]) -> list[int]:
    """[step] -> slot, from device to device so many slots apart, one slot from a way to the next, and waits there."""
    slots: list[int] = []
    for way, wait in enumerate((0, *waits)):
        slots.append(slots[-1] + 1 + wait if slots else 0)
        for _ in range(num_devices - 1):
            slots.append(slots[-1] + (back if way % 2 else outward))
    return slots


def repeated(block: Sequence[int], shop: Shop) -> list[int]:
    """[action] its slot, with `block` for every chain, `INTERVAL` slots apart."""
    num_stages, num_steps, device_of = shop.placement.num_stages, shop.num_steps, shop.device_of[0]
    start = [0] * (num_steps * shop.num_chains)
    taken: list[set[int]] = [set() for _ in range(shop.placement.num_devices)]
    gradients: list[list[int]] = [[] for _ in taken]
    for chain in range(shop.num_chains):
        for step, slot in enumerate(block):
            start[num_steps * chain + step] = INTERVAL * chain + slot
            taken[device_of[step]].add(INTERVAL * chain + slot)
            if step >= num_stages:
                gradients[device_of[step]].append(num_steps * chain + step)
    for slots, indices in zip(taken, gradients, strict=True):
        free = 0
        for index in sorted(indices, key=start.__getitem__):
            free = max(free, start[index] + 1)
            while free in slots:
                free += 1
            start[index + num_stages] = free
            free += 1
    return start
