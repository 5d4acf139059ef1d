"""One device of list scheduling: what is ready on it, what it stores, and what it may start next.

Memory never stops all devices where each starts only what is safe, as `Device.choose` has it: every chain before that
of an F or I can still get, on its device, what it lacks from what is free and what the chains before that one give back
when they end. So the oldest chain can always go on, and by its W gives back what it took (the banker's algorithm, with
the chains' numbers as the safe order).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from jaxpipe.schedules.ordering.flow_shop import Shop

SHIFT = 40  # room for chain * K + step below a key or a time
MASK = (1 << SHIFT) - 1


class Guide(NamedTuple):
    """What devices go by; times in ticks.

    Attributes:
        keys: [chain * K + step]; of what is ready, the least goes first.
        release: [chain] before which its first F does not start: what keeps memory for chains that are on their way.
        quotas: [device][slot] forwards of one stage that the device may hold, not yet given back; none if empty.
        forward_wait: an F waits for an action of a lesser key that will be ready within this share of its time.
        weight_wait: the same of a W.
    """

    keys: Sequence[int]
    release: Sequence[int]
    quotas: Sequence[Sequence[int]] = ()
    forward_wait: float = 0.0
    weight_wait: float = 0.0


class Device:
    """What a device has before it, and what it stores.

    Attributes:
        coming: heap of time of arrival and index.
        ready: heaps of key and index: the F of each slot, then I (or B), then W.
        free_at: ticks.
        left: ticks of work that has not started.
        row: what has started.
    """

    def __init__(self, shop: Shop, guide: Guide, number: int):
        num_stages, num_chunks = shop.placement.num_stages, shop.placement.num_chunks
        num_slots = num_chunks * shop.placement.num_replicas
        self.coming: list[int] = []
        self.ready: list[list[int]] = [[] for _ in range(num_slots + 2)]
        self.free_at, self.left = 0, shop.work[number]
        self.row: list[int] = []
        self._num_steps, self._slots, self._keys = shop.num_steps, range(num_slots), guide.keys
        self._slot_of = [slots[:num_stages] + [num_slots] * num_stages for slots in shop.slot_of]
        self._quotas = guide.quotas[number] if guide.quotas else [shop.num_chains] * num_slots
        # memory
        self._capacity, self._size, kept, _ = shop.sizes
        self._kept = kept if shop.is_split else self._size
        self._growth = shop.sizes.growth if shop.is_split else 0
        self._most_lacking = num_chunks * self._size + self._growth
        self._used, self._oldest = 0, 0  # the oldest chain that has not ended here
        self._held = [0] * shop.num_chains
        self._lacking = [num_chunks * self._size] * shop.num_chains  # for F that have still to start
        self._num_held = [0] * num_slots

    def admit(self, now: int) -> None:
        """What has arrived becomes ready."""
        coming = self.coming
        while coming and coming[0] >> SHIFT <= now:
            index = heappop(coming) & MASK
            chain, step = divmod(index, self._num_steps)
            slots = self._slot_of[chain % len(self._slot_of)]
            heappush(self.ready[slots[step]], (self._keys[index] << SHIFT) + index)

    def choose(self) -> list[int] | None:
        """The heap of the least key whose first action may start."""
        heaps, growth, size = self.ready, self._growth, self._size
        free = self._capacity - self._used
        chosen = heaps[-1] or None
        heap = heaps[-2]
        if (
            heap
            and (chosen is None or heap[0] < chosen[0])
            and (not growth or (free >= growth and self._is_safe(heap[0], free - growth)))
        ):
            chosen = heap
        if free >= size:
            for slot in self._slots:
                heap = heaps[slot]
                if (
                    heap
                    and (chosen is None or heap[0] < chosen[0])
                    and self._num_held[slot] < self._quotas[slot]
                    and self._is_safe(heap[0], free - size)
                ):
                    chosen = heap
        return chosen

    def _is_safe(self, entry: int, free: int) -> bool:
        """Whether all chains before that of `entry` can go on when `free` is left."""
        if free >= self._most_lacking:
            return True
        lacking, held, growth, most_lacking = self._lacking, self._held, self._growth, self._most_lacking
        for older in range(self._oldest, (entry & MASK) // self._num_steps):
            if free >= most_lacking:
                return True
            lacks, holds = lacking[older], held[older]
            if lacks + (growth if lacks or holds else 0) > free:
                return False
            free += holds
        return True

    def start_forward(self, chain: int, slot: int) -> None:
        """An F of `chain` takes its room, on the stage `slot` of the device."""
        self._used += self._size
        self._held[chain] += self._size
        self._lacking[chain] -= self._size
        self._num_held[slot] += 1

    def start_gradient(self, chain: int) -> None:
        """An I of `chain` turns activations into what its W needs."""
        self._used += self._kept - self._size
        self._held[chain] += self._kept - self._size

    def give_back(self, chain: int, slot: int) -> None:
        """A W or B of `chain` gives back the room of its stage."""
        held, lacking, oldest = self._held, self._lacking, self._oldest
        self._used -= self._kept
        held[chain] -= self._kept
        self._num_held[slot] -= 1
        while oldest < len(held) and not lacking[oldest] and not held[oldest]:
            oldest += 1
        self._oldest = oldest


# The event loop. It is the inner loop of the search, some microseconds for each action, hence plain lists.


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
