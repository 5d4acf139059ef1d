"""List scheduling under a bound of memory: a free device takes, of what is ready and fits, what has the least key.

Goes in: a shop and what its devices go by. Comes out: an order for each device. Which keys are good is for `pattern`
and `neighbours`. It is the inner loop of the search, a microsecond or so for each action, hence plain lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from jaxpipe.schedules.search.shop import Shop

_SHIFT = 40  # room for chain * K + step below a key
_MASK = (1 << _SHIFT) - 1


class Guide(NamedTuple):
    """What devices go by; times in ticks.

    Attributes:
        keys: [chain * K + step], each >= 0; of what is ready, the least goes first.
        release: [chain] before which its first F does not start: what keeps memory for chains that are on their way.
        quotas: [device][slot] forwards of one stage that the device may hold, not yet given back; none if empty.
        forward_wait: the share of its own time for which an F waits for an action of a lesser key that will be ready.
        weight_wait: the same of a W.
    """

    keys: Sequence[int]
    release: Sequence[int]
    quotas: Sequence[Sequence[int]] = ()
    forward_wait: float = 0.0
    weight_wait: float = 0.0


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

    Memory alone never stops all devices: an F or I starts only if, on its device, every chain before its own can
    still get what it lacks from what is free and what the chains before that one give back when they end. So the
    oldest chain can always go on, and by its W gives back what it took (the banker's algorithm, with the chains'
    numbers as the safe order).

    Args:
        shop: whose capacity is that of one chain at least: `Sizes.activations` and, if split, `Sizes.growth` over it.
        guide: of the devices.
        limit: ticks that the makespan must stay below.

    Returns:
        The order, or None if it would not stay below `limit`, or if quotas stop all devices.
    """
    num_stages, num_replicas = shop.placement.num_stages, shop.placement.num_replicas
    num_chains, num_steps, num_chunks = shop.num_chains, shop.num_steps, shop.placement.num_chunks
    num_devices = shop.placement.num_devices
    duration, device_of, slot_of, travel = shop.duration, shop.device_of, shop.slot_of, shop.travel
    capacity, size, kept, _ = shop.sizes
    growth = shop.sizes.growth if shop.is_split else 0
    keys, release, quotas = guide.keys, guide.release, guide.quotas
    wait = [guide.forward_wait] * num_stages + [0.0] * num_stages + [guide.weight_wait] * num_stages
    num_slots = num_chunks * num_replicas
    last_forward, last_backward = num_stages, 2 * num_stages
    devices = range(num_devices)
    # [device] heaps of key and index: the F of each slot, then I (or B), then W
    ready: list[list[list[int]]] = [[[] for _ in range(num_slots + 2)] for _ in devices]
    coming: list[list[int]] = [[] for _ in devices]  # heaps of time of arrival and index
    lacking = [[num_chunks] * num_chains for _ in devices]  # forwards that the chain has still to start there
    held = [[0] * num_chains for _ in devices]
    oldest, used, free_at, left = [0] * num_devices, [0] * num_devices, [0] * num_devices, list(shop.work)
    num_held = [[0] * num_slots for _ in devices]
    rows: list[list[int]] = [[] for _ in devices]
    start = [0] * (num_chains * num_steps)
    wake: list[int] = []  # heap of time * D + device: when to look at a device

    def is_safe(device: int, chain: int, free: int) -> bool:
        lacks, holds = lacking[device], held[device]
        most = num_chunks * size + growth
        for older in range(oldest[device], chain):
            if free >= most:
                return True
            if lacks[older] * size + (growth if lacks[older] or holds[older] else 0) > free:
                return False
            free += holds[older]
        return True

    for chain in range(min(num_replicas, num_chains)):
        device = device_of[chain][0]
        heappush(coming[device], (release[chain] << _SHIFT) + chain * num_steps)
        heappush(wake, release[chain] * num_devices + device)
    num_left, makespan = num_chains * num_steps, 0
    while wake:
        now, device = divmod(heappop(wake), num_devices)
        if free_at[device] > now:
            continue
        arriving, heaps = coming[device], ready[device]
        while arriving and arriving[0] >> _SHIFT <= now:
            index = heappop(arriving) & _MASK
            chain, step = divmod(index, num_steps)
            slot = slot_of[chain % num_replicas][step] if step < last_forward else num_slots
            heappush(heaps[slot], (keys[index] << _SHIFT) + index)

        best, chosen = 0, None
        heap = heaps[num_slots + 1]
        if heap:
            best, chosen = heap[0], heap
        heap = heaps[num_slots]
        free = capacity - used[device]
        if (
            heap
            and (chosen is None or heap[0] < best)
            and (not growth or (free >= growth and is_safe(device, (heap[0] & _MASK) // num_steps, free - growth)))
        ):
            best, chosen = heap[0], heap
        if free >= size:
            for slot in range(num_slots):
                heap = heaps[slot]
                if not heap or (chosen is not None and heap[0] > best):
                    continue
                if quotas and num_held[device][slot] >= quotas[device][slot]:
                    continue
                if is_safe(device, (heap[0] & _MASK) // num_steps, free - size):
                    best, chosen = heap[0], heap
        if chosen is None:
            continue
        index = best & _MASK
        chain, step = divmod(index, num_steps)
        time = duration[step]
        if arriving and wait[step]:
            soon = arriving[0]
            if (soon >> _SHIFT) - now <= wait[step] * time and keys[soon & _MASK] < best >> _SHIFT:
                continue
        if now + left[device] >= limit:
            return None

        heappop(chosen)
        end = now + time
        left[device] -= time
        free_at[device], start[index] = end, now
        makespan = max(makespan, end)
        rows[device].append(index)
        num_left -= 1
        replica = chain % num_replicas
        heappush(wake, end * num_devices + device)
        lacks, holds = lacking[device], held[device]
        if step < last_forward:
            used[device] += size
            holds[chain] += size
            lacks[chain] -= 1
            num_held[device][slot_of[replica][step]] += 1
            if step == 0 and (new := chain + num_replicas) < num_chains:
                at = max(end, release[new])
                heappush(arriving, (at << _SHIFT) + new * num_steps)
                heappush(wake, at * num_devices + device)
        elif shop.is_split and step < last_backward:
            used[device] += kept - size
            holds[chain] += kept - size
            heappush(heaps[num_slots + 1], (keys[index + num_stages] << _SHIFT) + index + num_stages)
        else:
            given_back = kept if shop.is_split else size
            used[device] -= given_back
            holds[chain] -= given_back
            num_held[device][slot_of[replica][step]] -= 1
            position = oldest[device]
            while position < num_chains and not lacks[position] and not holds[position]:
                position += 1
            oldest[device] = position
        if step + 1 < last_backward:
            at, target = end + travel[replica][step], device_of[replica][step + 1]
            heappush(coming[target], (at << _SHIFT) + index + 1)
            if free_at[target] <= at:
                heappush(wake, at * num_devices + target)
    return None if num_left else Order(makespan, start, rows)
