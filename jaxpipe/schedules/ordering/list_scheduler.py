"""List scheduling under a memory bound: a free device starts the ready action with the least key that fits.

Goes in: a flow shop, and a `Guide` with keys, quotas, a cap and waits. Comes out: an order for each device. Left to
others: good keys (`pattern`, the search). List scheduling is the inner loop of the search, some microseconds an action,
hence plain lists.

Memory never stops all devices, since each starts only safe actions: after an F or I starts, every earlier microbatch
can still get the memory it lacks on its device, from free memory and from the microbatches before it when they
end. So the oldest microbatch can always continue, and its W frees the memory it took: the banker's algorithm, with the
microbatches' numbers as the safe order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from jaxpipe.schedules.ordering.flow_shop import FlowShop

SHIFT = 40  # bits for the action's number below a key or a time, so that a heap compares single integers
MASK = (1 << SHIFT) - 1


class Guide(NamedTuple):
    """The preferences of all devices; times in ticks, actions numbered as in `FlowShop`."""

    keys: Sequence[int]  # [action] priority: of the ready actions, the one with the least key goes first
    release: Sequence[int]  # [microbatch] earliest start of its first F, which keeps memory for earlier microbatches
    # [device][chunk] forwards of one stage that the device may hold at once; no quotas if empty
    quotas: Sequence[Sequence[int]] = ()
    # an F waits for an action with a smaller key that will be ready within this fraction of the F's time
    forward_wait: float = 0.0
    weight_wait: float = 0.0  # the same fraction for a W
    # a device that holds `cap` forwards starts no other one of the first `num_capped` stages, and all may stop so
    cap: int = sys.maxsize
    num_capped: int = 0


class DeviceState:
    """The state of a device during list scheduling: ready actions, used memory, started actions.

    Attributes:
        coming: heap of (time of arrival, action).
        ready: heaps of (key, action): the F of each chunk, then I (or B), then W.
        free_at: ticks when the device becomes free.
        left: ticks of work that has not started.
        row: the actions that have started, in order.
    """

    def __init__(self, shop: FlowShop, guide: Guide, number: int):
        num_stages = shop.placement.num_stages
        num_chunks = shop.placement.num_chunks
        num_heaps = num_chunks * shop.placement.num_replicas  # of F; chunks of both replicas are numbered on
        self.coming: list[int] = []
        # A heap for the F of each stage, since quotas and memory hold up stages one by one; then I or B, then W.
        self.ready: list[list[int]] = [[] for _ in range(num_heaps + 2)]
        self.free_at = 0
        self.left = shop.work[number]
        self.row: list[int] = []
        self._num_steps = shop.num_operations
        self._chunks = range(num_heaps)
        self._keys = guide.keys
        # [replica][operation] -> heap of `ready`; W are pushed by the event loop, when their I has started.
        self._chunk_of = [chunks[:num_stages] + [num_heaps] * num_stages for chunks in shop.chunk_of]
        self._quotas = guide.quotas[number] if guide.quotas else [shop.num_microbatches] * num_heaps
        stages = shop.placement.stages_of[number]
        self._caps = [guide.cap if stage < guide.num_capped else sys.maxsize for _, stage in stages]
        # Memory: `_held` is what each microbatch has taken here, `_lacking` what its F still have to take.
        self._capacity, self._size, kept, _ = shop.sizes
        # A whole backward keeps the activations until it ends.
        self._kept = kept if shop.is_split else self._size
        self._growth = shop.sizes.growth if shop.is_split else 0
        self._most_lacking = num_chunks * self._size + self._growth
        # `_oldest` is the first microbatch that has not ended here
        self._used = 0
        self._oldest = 0
        self._held = [0] * shop.num_microbatches
        self._lacking = [num_chunks * self._size] * shop.num_microbatches
        self._num_held = [0] * num_heaps

    def admit(self, now: int) -> None:
        """Moves actions that have arrived by `now` to the ready heaps."""
        coming = self.coming
        while coming and coming[0] >> SHIFT <= now:
            index = heappop(coming) & MASK
            microbatch, operation = divmod(index, self._num_steps)
            chunks = self._chunk_of[microbatch % len(self._chunk_of)]
            # Of equal keys the lower number goes first, so that an order does not depend on the order of arrival.
            heappush(self.ready[chunks[operation]], (self._keys[index] << SHIFT) + index)

    def choose(self) -> list[int] | None:
        """The heap whose first action may start and has the least key; None if no action may start."""
        heaps = self.ready
        growth = self._growth
        size = self._size
        free = self._capacity - self._used
        # W take no memory, so one may always start.
        chosen = heaps[-1] or None
        heap = heaps[-2]
        if (
            heap
            and (chosen is None or heap[0] < chosen[0])
            # I take memory only where the inputs of W are larger than the activations.
            and (not growth or (free >= growth and self._is_safe(heap[0], free - growth)))
        ):
            chosen = heap
        if free >= size:
            for chunk in self._chunks:
                heap = heaps[chunk]
                if (
                    heap
                    and (chosen is None or heap[0] < chosen[0])
                    and self._num_held[chunk] < self._quotas[chunk]
                    and (self._caps[chunk] == sys.maxsize or sum(self._num_held) < self._caps[chunk])
                    and self._is_safe(heap[0], free - size)
                ):
                    chosen = heap
        return chosen

    def _is_safe(self, entry: int, free: int) -> bool:
        """Whether every microbatch before that of `entry` can still end if `free` memory is left."""
        if free >= self._most_lacking:
            return True
        lacking = self._lacking
        held = self._held
        growth = self._growth
        # Local names: this loop is the innermost of the search.
        most_lacking = self._most_lacking
        for older in range(self._oldest, (entry & MASK) // self._num_steps):
            if free >= most_lacking:
                return True
            lacks = lacking[older]
            holds = held[older]
            # A microbatch that holds something, or has an F to come, may have an I to come, which needs `growth` for a
            # while.
            if lacks + (growth if lacks or holds else 0) > free:
                return False
            # When it has ended, the next one may use what it held.
            free += holds
        return True

    def start_forward(self, microbatch: int, chunk: int) -> None:
        """Takes the room of an F of `microbatch`, on the stage `chunk` of the device."""
        self._used += self._size
        self._held[microbatch] += self._size
        self._lacking[microbatch] -= self._size
        self._num_held[chunk] += 1

    def start_gradient(self, microbatch: int) -> None:
        """Turns stored activations of `microbatch` into the inputs of its W, when an I starts."""
        self._used += self._kept - self._size
        self._held[microbatch] += self._kept - self._size

    def give_back(self, microbatch: int, chunk: int) -> None:
        """Gives back the room of one stage of `microbatch`, after a W or B."""
        held = self._held
        lacking = self._lacking
        oldest = self._oldest
        self._used -= self._kept
        held[microbatch] -= self._kept
        self._num_held[chunk] -= 1
        # Microbatches that have ended are safe; `_is_safe` need not look at them again.
        while oldest < len(held) and not lacking[oldest] and not held[oldest]:
            oldest += 1
        self._oldest = oldest


# ---- The event loop


class ListSchedule(NamedTuple):
    """An order of all actions, numbered as in `FlowShop`."""

    makespan: int  # ticks until all actions have ended
    start: list[int]  # [action] start in ticks
    rows: list[list[int]]  # [device][position] -> action


def list_schedule(shop: FlowShop, guide: Guide, limit: int) -> ListSchedule | None:
    """Returns the order in which devices run all actions, each by `guide` and within its memory.

    Args:
        shop: the flow shop; its capacity is at least that of one microbatch: `StorageSizes.activations` of all stages
            of a device and, if backwards are split, `StorageSizes.growth`.
        guide: preferences of the devices.
        limit: ticks that the makespan must stay below.

    Returns:
        The order, or None if its makespan would not be below `limit`, or if quotas stop all devices.

    Example:
        Two devices, three microbatches of 0F 1F 1B 0B, numbered 0..3, 4..7, 8..11; a device may store two of them. Keys
        are the starts of a microbatch that runs alone, three ticks apart:

            time      0  1  2  3  4  5  6  7  8  9 10 11
            device 0  0  4  .  .  3  3  8  7  7  . 11 11    at 2, memory is full: 8 waits for 3
            device 1  .  1  2  2  5  6  6  9 10 10

        >>> from jaxpipe.schedules.analysis.costs import Costs
        >>> from jaxpipe.schedules.ordering.flow_shop import flow_shop
        >>> from jaxpipe.schedules.ordering.problem import StorageSizes
        >>> from jaxpipe.schedules.placement import linear
        >>> shop = flow_shop(linear(2), 3, Costs(), StorageSizes(2), is_split=False, ticks_per_unit=1)
        >>> keys = [3 * microbatch + at for microbatch in range(3) for at in (0, 1, 2, 4)]
        >>> found = list_schedule(shop, Guide(keys, release=(0, 0, 0)), limit=100)
        >>> found.rows, found.makespan  # 1F1B
        ([[0, 4, 3, 8, 7, 11], [1, 2, 5, 6, 9, 10]], 12)
    """
    placement = shop.placement
    num_microbatches = shop.num_microbatches
    num_operations = shop.num_operations
    num_stages = placement.num_stages
    num_replicas = placement.num_replicas
    num_devices = placement.num_devices
    last_forward = num_stages
    last_backward = 2 * num_stages
    is_split = shop.is_split
    duration = shop.duration
    device_of = shop.device_of
    chunk_of = shop.chunk_of
    travel = shop.travel
    keys = guide.keys
    release = guide.release
    wait = [guide.forward_wait] * num_stages + [0.0] * num_stages + [guide.weight_wait] * num_stages
    devices = [DeviceState(shop, guide, number) for number in range(num_devices)]
    start = [0] * (num_microbatches * num_operations)
    wake: list[int] = []  # heap of time * D + device: times to look at a device again

    def arrive(index: int, at: int, number: int) -> None:
        heappush(devices[number].coming, (at << SHIFT) + index)
        # A device that computes looks at what has arrived when it is free.
        if devices[number].free_at <= at:
            heappush(wake, at * num_devices + number)

    # Later microbatches of a replica follow when the first F of the one before has started.
    for microbatch in range(min(num_replicas, num_microbatches)):
        arrive(microbatch * num_operations, release[microbatch], device_of[microbatch][0])
    num_left = num_microbatches * num_operations
    makespan = 0
    while wake:
        now, number = divmod(heappop(wake), num_devices)
        device = devices[number]
        # The device has started another action since it was to be woken.
        if device.free_at > now:
            continue
        if device.coming and device.coming[0] >> SHIFT <= now:
            device.admit(now)
        heap = device.choose()
        if heap is None:
            continue
        index = heap[0] & MASK
        microbatch, operation = divmod(index, num_operations)
        time = duration[operation]
        # An F or W waits for a better action that will be ready soon: its arrival wakes the device again.
        if device.coming and wait[operation]:
            soon = device.coming[0]
            if (soon >> SHIFT) - now <= wait[operation] * time and keys[soon & MASK] < heap[0] >> SHIFT:
                continue
        # No order can be shorter than this: the device has so much to do from now on.
        if now + device.left >= limit:
            return None

        # The action starts.
        heappop(heap)
        end = now + time
        start[index] = now
        makespan = max(makespan, end)
        num_left -= 1
        device.free_at = end
        device.left -= time
        device.row.append(index)
        heappush(wake, end * num_devices + number)
        replica = microbatch % num_replicas
        if operation < last_forward:
            device.start_forward(microbatch, chunk_of[replica][operation])
            # The replica's next microbatch may start; it is safe to start them in the order of their numbers.
            if operation == 0 and (new := microbatch + num_replicas) < num_microbatches:
                at = max(end, release[new])
                heappush(device.coming, (at << SHIFT) + new * num_operations)
                heappush(wake, at * num_devices + number)
        elif is_split and operation < last_backward:
            device.start_gradient(microbatch)
            # The W may run as soon as this device is free, for its I has run here.
            heappush(device.ready[-1], (keys[index + num_stages] << SHIFT) + index + num_stages)
        else:
            device.give_back(microbatch, chunk_of[replica][operation])
        if operation + 1 < last_backward:
            arrive(index + 1, end + travel[replica][operation], device_of[replica][operation + 1])
    rows = [device.row for device in devices]
    # Quotas and caps may stop all devices; memory alone never does.
    return None if num_left else ListSchedule(makespan, start, rows)
