"""Short schedules under a memory bound, for split backwards on any placement of one replica.

Goes in: placement, microbatches, times of F, I and W, the bound, and a building block that fits the placement: one
microbatch's path over the devices, repeated for every microbatch. Comes out: a schedule. Candidates are the block and
list schedules of some patterns; compaction shortens each. The best is the shortest, of these the one whose
devices have the smallest gaps, of these the one that stores least. No order is guaranteed to be optimal;
if one is known to be, its method says so.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362); the offsets of V-Min
and V-Half as in their repository, github.com/sail-sg/zero-bubble; those of ZB-V ours.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs, split_costs
from jaxpipe.schedules.ordering.compaction import compacted, in_order
from jaxpipe.schedules.ordering.flow_shop import FlowShop, flow_shop
from jaxpipe.schedules.ordering.list_scheduler import list_schedule
from jaxpipe.schedules.ordering.pattern import NEVER_FIRST, Pattern
from jaxpipe.schedules.ordering.problem import StorageSizes
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Schedule

SPLIT = 3  # F, I and W of a stage


def v_min_block(num_devices: int) -> list[int]:
    """[operation] -> time slot of F and I of a V; without waits between devices.

    If D modulo 3 is 0, the block waits two slots before the first I, as published; if it is 2, two where the V turns
    (ours): at F=I=W this is as good as the published block without waits, and better if I is longer than W.

    Example:
        >>> v_min_block(2)
        [0, 1, 4, 5, 8, 9, 12, 13]
    """
    # By D modulo 3: waits at the first turning point, before the first I, and at the second turning point.
    return _block(num_devices, outward=1, back=1, waits=((0, 2, 0), (0, 0, 0), (2, 2, 2))[num_devices % 3])


def v_half_block(num_devices: int) -> list[int]:
    """[operation] -> time slot of F and I of a V; outward every second one, and for even D three before the first I.

    Example:
        >>> v_half_block(2)
        [0, 2, 3, 4, 8, 10, 12, 13]
    """
    return _block(num_devices, outward=2, back=1, waits=(0, 0 if num_devices % 2 else 3, 1))


def zb_v_block(num_devices: int) -> list[int]:
    """[operation] -> time slot of F and I of a V; outward every fourth slot, back every second one.

    Example:
        >>> zb_v_block(2)
        [0, 4, 5, 7, 8, 12, 13, 15]
    """
    return _block(num_devices, outward=4, back=2, waits=(0, 0, 0))


def line_block(num_devices: int) -> list[int]:
    """[operation] -> time slot of F and I of a line of devices, as in 1F1B: forward by one slot, back by two.

    Example:
        >>> line_block(3)
        [0, 1, 2, 3, 5, 7]
    """
    return [*range(num_devices), *range(num_devices, 3 * num_devices - 1, 2)]


def _block(num_devices: int, *, outward: int, back: int, waits: tuple[int, int, int]) -> list[int]:
    """[operation] -> time slot of a V's four passes: `outward` or `back` slots from device to device.

    Between two passes there is one slot, plus those of `waits`.
    """
    slots: list[int] = []
    for way, wait in enumerate((0, *waits)):
        slots.append(slots[-1] + 1 + wait if slots else 0)
        for _ in range(num_devices - 1):
            slots.append(slots[-1] + (back if way % 2 else outward))
    return slots


def repeated(block: Sequence[int], shop: FlowShop, bound: int) -> list[int]:
    """[action] slot: `block` for every microbatch, one interval apart, and W in the free slots of its device.

    In `block`, [operation] of F and I, a device has at most one action in a slot, modulo the interval.

    An interval has a slot for F, I and W of each stage of a device. Slots are equally long; at other durations
    `compaction` closes the gaps. W are first in, first out, and wait for as many intervals as the bound allows, since
    those of the end have nothing to wait for.
    """
    num_stages = shop.placement.num_stages
    num_operations = shop.num_operations
    device_of = shop.device_of[0]
    # many microbatches show the most that a device stores
    num_chunks = shop.placement.num_chunks
    many = len(block)
    interval = SPLIT * num_chunks
    start = [0] * (num_operations * shop.num_microbatches)

    def timed(operations: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
        """(slot, action) of these operations, in order."""
        microbatches = ((interval * m, num_operations * m) for m in range(num_microbatches))
        pairs = ((at + block[operation], first + operation) for at, first in microbatches for operation in operations)
        return sorted(pairs)

    for device in range(shop.placement.num_devices):
        own = [operation for operation in range(many) if device_of[operation] == device]
        forwards = own[:num_chunks]
        gradients = own[num_chunks:]
        stored = _most_stored(timed(forwards, many), timed(gradients, many))
        # Each interval that W wait keeps one more microbatch: as many activations as a device has stages.
        wait = max(0, bound - stored) // num_chunks * interval
        of_f = timed(forwards, shop.num_microbatches)
        of_i = timed(gradients, shop.num_microbatches)
        for slot, index in (*of_f, *of_i):
            start[index] = slot
        for (_, index), slot in zip(of_i, _weight_slots(of_f, of_i, wait), strict=True):
            start[index + num_stages] = slot
    return start


def _weight_slots(of_f: Sequence[tuple[int, int]], of_i: Sequence[tuple[int, int]], wait: int) -> list[int]:
    """[W] the first free slot of each, in order, `wait` slots or more after its I; (slot, action) of F and I are given.

    Example:
        >>> _weight_slots([(0, 0), (3, 6)], [(1, 1), (4, 7)], 3)
        [5, 8]
    """
    taken = {slot for slot, _ in (*of_f, *of_i)}
    slots = []
    free = 0
    for slot, _ in of_i:
        free = max(free, slot + wait + 1)
        while free in taken:
            free += 1
        slots.append(free)
        free += 1
    return slots


def _most_stored(of_f: Sequence[tuple[int, int]], of_i: Sequence[tuple[int, int]]) -> int:
    """The most activations on a device whose W do not wait; (slot, action) of its F and I are given."""
    weights = _weight_slots(of_f, of_i, 0)
    # At its own F the device has `stored` + 1 forwards behind it, less the W that have begun.
    return max(stored + 1 - bisect_left(weights, slot) for stored, (slot, _) in enumerate(of_f))


# ---- The search among building blocks and list schedules

TICKS_PER_FORWARD = 10**6  # whole numbers, so that equal sums compare as equal
_BEFORE_ITS_END = 1 - 1e-6  # W waits for an action that will be ready while the W would run
_TIE = 0.001  # in intervals: of an F and an I that would start at the same time, the F goes first
_MOST_LONGER = 1.1  # list schedules that exceed the best makespan by this factor are not compacted, to save time


class Merit(NamedTuple):
    """The figures by which orders are compared, the most important first; less is better."""

    makespan: int  # ticks of the step
    gaps: int  # the most ticks that any device waits between its first start and its last end
    most_stored: int  # stages' activations on a device at once


def memory_bounded(
    name: str,
    placement: Placement,
    num_microbatches: int,
    costs: Costs,
    bound: int,
    block: Sequence[int] = (),
    *,
    staggered: bool = False,
) -> Schedule:
    """Returns the best schedule found whose devices store at most `bound` stages' activations.

    If the costs are not equal, the best orders for equal ones and for I as long as F are among the candidates, so that
    given costs make no step longer.

    Args:
        name: name of the schedule.
        placement: placement of one replica.
        num_microbatches: microbatches of one step.
        costs: those of `split_costs`.
        bound: stages' activations that a device may store, from the start of F to the end of W; at least the stages of
            a device.
        block: [operation] -> time slot of F and I of a microbatch; none by default.
        staggered: whether devices that start first should end first, so that none has gaps.
    """
    problem = _Problem(placement, num_microbatches, bound, tuple(block), staggered)
    forward, input_gradient, weight_gradient = costs.mean_split
    are_equal = forward == input_gradient == weight_gradient
    # Orders for I as long as F are more regular, and often shorter at the given costs than what is found for these.
    nearer = () if are_equal else dict.fromkeys((split_costs(forward, forward, weight_gradient), costs))
    start = _orders(problem, (Costs(), *nearer))[0]
    shop = problem.shop_at(costs)
    return Schedule(name, placement, num_microbatches, shop.rows_of(shop.order_of(start)))


class _Problem(NamedTuple):
    """All but the costs; fields as the arguments of `memory_bounded`."""

    placement: Placement
    num_microbatches: int
    bound: int
    block: tuple[int, ...]
    staggered: bool

    def shop_at(self, costs: Costs) -> FlowShop:
        """The flow shop at `costs`, in ticks."""
        return flow_shop(
            self.placement,
            self.num_microbatches,
            costs,
            StorageSizes(self.bound),
            is_split=True,
            ticks_per_unit=TICKS_PER_FORWARD / costs.mean_split[0],
        )


def _orders(problem: _Problem, costs: tuple[Costs, ...]) -> list[list[int]]:
    """[order][action] start: the best order found for each of `costs`, the last first, then the block.

    Orders for earlier costs are among the candidates for later ones.
    """
    # The recursion ends with the block, whose slots are equally long.
    if not costs:
        shop = problem.shop_at(Costs())
        start = repeated(problem.block, shop, problem.bound) if problem.block else None
        # A bound below what the block stores without waits: then only list schedules are left.
        return [start] if start and merit(start, shop).most_stored <= problem.bound else []
    earlier = _earlier_orders(problem, costs[:-1])
    return [_best(problem.shop_at(costs[-1]), earlier, staggered=problem.staggered), *earlier]


@cache  # plans ask for many costs, which have the first ones in common; what is found for all of them is a spec's
def _earlier_orders(problem: _Problem, costs: tuple[Costs, ...]) -> list[list[int]]:
    return _orders(problem, costs)


def _best(shop: FlowShop, orders: Sequence[Sequence[int]], *, staggered: bool) -> list[int]:
    """[action] start of the best order found; tries `orders` before list schedules."""
    tails = [shop.duration[0] * others for others in reversed(range(shop.placement.num_devices))]
    # First as is, since tails may make the step itself longer; then with tails; last without them, for the rest. Given
    # orders are regular, so they come first, and as they are: what compaction moves sends more in vain, once compiled.
    rounds = (None, tails, ()) if staggered else ((),)
    best: tuple[Merit, list[int]] | None = None

    def starts() -> Iterator[tuple[list[int], tuple[list[int] | tuple[()] | None, ...]]]:
        for order in orders:
            yield in_order(order, shop), rounds if staggered else (None, *rounds)
        for pattern in _patterns(shop):
            limit = int(_MOST_LONGER * best[0].makespan) + 1 if best else sys.maxsize
            if order := list_schedule(shop, pattern.guide(shop), limit):
                yield order.start, rounds

    def waits_less(order: Sequence[int], than: Sequence[int]) -> bool:
        return makespan_with_messages(order, shop) < makespan_with_messages(than, shop)

    tried: list[list[int]] = []  # patterns often lead to one order
    for start, rounds_of in starts():
        if start in tried:
            continue
        tried.append(start)
        # None: the order as it is; else it is compacted with these tails, each from where the one before has left it.
        for tail in rounds_of:
            if tail is not None:
                start = compacted(start, shop, tail)
            reached = merit(start, shop)
            # Among orders that tie with free messages, the one that waits least for messages is best on any real link.
            if best is None or reached < best[0] or (reached == best[0] and waits_less(start, best[1])):
                best = reached, start
            # No order is shorter or has smaller gaps, so the others need not be tried.
            if reached[:2] == (shop.least_makespan(), 0):
                return start
    assert best  # a pattern without quotas leads to an order
    return best[1]


def _patterns(shop: FlowShop) -> list[Pattern]:
    """Patterns to try: input gradients first, W after or before actions that come soon."""
    num_chunks = shop.placement.num_chunks
    as_they_run = (1.0,) * (2 * num_chunks)
    backwards_last = (1.5,) * num_chunks + (3.0,) * num_chunks
    gradients_first = Pattern(as_they_run, pause=-NEVER_FIRST, weight_delay=2 * NEVER_FIRST)
    return [
        replace(gradients_first, weight_wait=_BEFORE_ITS_END),
        gradients_first,
        Pattern(as_they_run, pause=_TIE, weight_wait=_BEFORE_ITS_END),
        Pattern(backwards_last, pause=_TIE - 1 / num_chunks, weight_wait=_BEFORE_ITS_END),
    ]


def merit(start: Sequence[int], shop: FlowShop) -> Merit:
    """The merit of the order whose actions start at `start`, [action] in ticks."""
    begin = np.array(start)
    device = np.tile(shop.device_of[0], shop.num_microbatches)
    end = begin + np.tile(shop.duration, shop.num_microbatches)
    in_rows = np.lexsort((begin, device))
    # The first action of each device; the one before it is the last of another.
    first = np.flatnonzero(np.diff(device[in_rows], prepend=-1))
    ends = end[in_rows[np.append(first[1:], len(begin)) - 1]]
    # F takes one, W gives it back, I keeps it. A device frees all, so that the sums of the next one begin at 0.
    takes = np.repeat((1, 0, -1), shop.placement.num_stages)
    stored = np.cumsum(np.tile(takes, shop.num_microbatches)[in_rows])
    return Merit(int(ends.max()), int((ends - begin[in_rows[first]] - shop.work).max()), int(stored.max()))


def makespan_with_messages(start: Sequence[int], shop: FlowShop) -> int:
    """Ticks of the step in the order of `start` where a message takes a tenth of a forward."""
    later = in_order(start, shop, message=shop.duration[0] // 10)
    return int((np.array(later) + np.tile(shop.duration, shop.num_microbatches)).max())
