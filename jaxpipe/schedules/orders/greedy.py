"""List scheduling under a bound of memory: a free device takes, of what is ready and fits, what has the least key.

Goes in: a shop and what its devices go by. Comes out: an order for each device. Which keys are good is for `pattern`
and for the search. It is the inner loop of that, some microseconds for each action, hence plain lists.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from jaxpipe.schedules.orders.device import MASK, SHIFT, Device, Guide
from jaxpipe.schedules.orders.shop import Shop


class Order(NamedTuple):
    """What `greedy` finds.

    Attributes:
        makespan: in ticks.
        start: [chain * K + step] in ticks.
        rows: [device][position] -> chain * K + step.
    """

    makespan: int
    start: list[int]
    rows: list[list[int]]


def greedy(shop: Shop, guide: Guide, limit: int) -> Order | None:
    """Returns the order in which all chains run, each device by `guide` and within its memory.

    Memory alone never stops all devices (`device`).

    Args:
        shop: whose capacity is that of one chain at least: `Sizes.activations` and, if split, `Sizes.growth` over it.
        guide: of the devices.
        limit: ticks that the makespan must stay below.

    Returns:
        The order, or None if it would not stay below `limit`, or if quotas stop all devices.
    """
    placement, num_chains, num_steps, is_split = shop.placement, shop.num_chains, shop.num_steps, shop.is_split
    num_stages, num_replicas, num_devices = placement.num_stages, placement.num_replicas, placement.num_devices
    last_forward, last_backward = num_stages, 2 * num_stages
    duration, device_of, slot_of, travel = shop.duration, shop.device_of, shop.slot_of, shop.travel
    keys, release = guide.keys, guide.release
    wait = [guide.forward_wait] * num_stages + [0.0] * num_stages + [guide.weight_wait] * num_stages
    devices = [Device(shop, guide, number) for number in range(num_devices)]
    start = [0] * (num_chains * num_steps)
    wake: list[int] = []  # heap of time * D + device: when to look at a device

    def arrive(index: int, at: int, number: int) -> None:
        heappush(devices[number].coming, (at << SHIFT) + index)
        if devices[number].free_at <= at:
            heappush(wake, at * num_devices + number)

    for chain in range(min(num_replicas, num_chains)):
        arrive(chain * num_steps, release[chain], device_of[chain][0])
    num_left, makespan = num_chains * num_steps, 0
    while wake:
        now, number = divmod(heappop(wake), num_devices)
        device = devices[number]
        if device.free_at > now:
            continue
        if device.coming and device.coming[0] >> SHIFT <= now:
            device.admit(now)
        heap = device.choose()
        if heap is None:
            continue
        index = heap[0] & MASK
        chain, step = divmod(index, num_steps)
        time = duration[step]
        if device.coming and wait[step]:
            soon = device.coming[0]
            if (soon >> SHIFT) - now <= wait[step] * time and keys[soon & MASK] < heap[0] >> SHIFT:
                continue
        if now + device.left >= limit:
            return None

        heappop(heap)
        end = now + time
        start[index] = now
        makespan = max(makespan, end)
        num_left -= 1
        device.free_at = end
        device.left -= time
        device.row.append(index)
        heappush(wake, end * num_devices + number)
        replica = chain % num_replicas
        if step < last_forward:
            device.start_forward(chain, slot_of[replica][step])
            if step == 0 and (new := chain + num_replicas) < num_chains:
                at = max(end, release[new])
                heappush(device.coming, (at << SHIFT) + new * num_steps)
                heappush(wake, at * num_devices + number)
        elif is_split and step < last_backward:
            device.start_gradient(chain)
            heappush(device.ready[-1], (keys[index + num_stages] << SHIFT) + index + num_stages)
        else:
            device.give_back(chain, slot_of[replica][step])
        if step + 1 < last_backward:
            arrive(index + 1, end + travel[replica][step], device_of[replica][step + 1])
    rows = [device.row for device in devices]
    return None if num_left else Order(makespan, start, rows)
