"""Patterns: priorities for list scheduling that are the same for all microbatches.

Goes in: a few numbers. Comes out: a `Guide` for `list_schedule`. Good numbers are in `memory_bounded` for some
schedules, and the search tries others. A pattern expresses the idea of the building blocks of controllable memory (Qi
et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024): the time that a microbatch takes for each hop sets
how long each device stores it. Here it is a preference, not a timetable: devices run any ready action.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from jaxpipe.schedules.ordering.flow_shop import FlowShop
from jaxpipe.schedules.ordering.list_scheduler import Guide

NEVER_FIRST = 1000.0  # intervals: W runs only if nothing else is ready


@dataclass(frozen=True)
class Pattern:
    """Preferences in a form that can be drawn and varied; intervals are those of `FlowShop.interval`."""

    # [pass] planned time of an operation, in its own durations; a pass is D operations of a microbatch
    hops: tuple[float, ...]
    pause: float = 0.0  # intervals between the last F and the first I; below 0 input gradients go first
    weight_delay: float = NEVER_FIRST  # intervals from the start of an I to that of its W
    spacing: float = 0.0  # intervals between the starts of microbatches; 0 lets them start whenever they can
    burst: float = 0.0  # number of first microbatches that may start without `spacing`
    forward_wait: float = 0.0  # fields of the `Guide`
    weight_wait: float = 0.0
    # forwards by which the quotas of a device's stages, in proportion to their planned storage times, exceed the
    # capacity; below 0 there are no quotas
    room: int = -1
    shifts: tuple[int, ...] = ()  # [operation] ticks added to the plan; none if empty

    def guide(self, shop: FlowShop) -> Guide:
        """The guide for the devices of `shop`."""
        plan = self._plan(shop)
        interval = shop.interval
        quotas = _quotas(shop, plan, self.room) if self.room >= 0 else ()
        if self.shifts:
            plan = [at + shift for at, shift in zip(plan, self.shifts, strict=True)]
        keys = [microbatch * interval + at for microbatch in range(shop.num_microbatches) for at in plan]
        release = [
            max(0, int((microbatch - self.burst) * interval * self.spacing)) if self.spacing else 0
            for microbatch in range(shop.num_microbatches)
        ]
        return Guide(keys, release, quotas, self.forward_wait, self.weight_wait)

    def _plan(self, shop: FlowShop) -> list[int]:
        """[operation] planned ticks after the start of its microbatch."""
        num_stages = shop.placement.num_stages
        num_devices = shop.placement.num_devices
        plan = []
        at = 0
        for operation in range(2 * num_stages):
            if operation == num_stages:
                at += int(self.pause * shop.interval)
            plan.append(at)
            at += int(shop.duration[operation] * self.hops[operation // num_devices])
        # W behind I in the plan; whole backwards have no W, and the list is cut off before.
        delay = int(self.weight_delay * shop.interval)
        return (plan + [at + delay for at in plan[num_stages:]])[: shop.num_operations]


def plain(shop: FlowShop) -> Pattern:
    """The pattern of microbatches that never wait; without quotas, so that `list_schedule` always ends."""
    return Pattern((1.0,) * (2 * shop.placement.num_chunks))


def _quotas(shop: FlowShop, plan: list[int], room: int) -> list[list[int]]:
    """[device][chunk] forwards that the device may hold, in proportion to their planned storage time; at least one."""
    num_stages = shop.placement.num_stages
    fits = shop.sizes.num_forwards
    last = [plan[2 * num_stages - 1 - stage] + shop.duration[2 * num_stages - 1 - stage] for stage in range(num_stages)]
    quotas = []
    for stages in shop.placement.stages_of:
        # At least one tick, so that their sum is never 0.
        stays = [max(1, last[stage] - plan[stage] + shop.duration[-1]) for _, stage in stages]
        shares = [(fits + room) * stay / sum(stays) for stay in stays]
        counts = [max(1, int(share)) for share in shares]
        # What rounding has taken goes to the stages that lost most by it.
        by_rest = sorted(range(len(shares)), key=lambda chunk: counts[chunk] - shares[chunk])
        for extra in range(fits + room - sum(counts)):
            counts[by_rest[extra % len(counts)]] += 1
        # More than fit at once would bind nothing.
        quotas.append([min(count, fits) for count in counts])
    return quotas


# ---- Random patterns for the search: new ones, and variations of a known one

# A value that stands twice is drawn twice as often.
_DRAWS: dict[str, tuple[float, ...]] = {
    "pause": (0.0, 0.0, 0.2, 0.4),
    "weight_delay": (-1.0, 0.0, 0.5, 1.0, 2.0, NEVER_FIRST),
    "spacing": (0.0, 0.8, 0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.15),
    "burst": (0.0, 1.0, 2.0, 3.0, 4.0),
    "forward_wait": (0.0, 0.0, 0.3, 0.6, 1.0),
    "weight_wait": (0.0, 0.0, 0.3, 0.6, 1.0),
    "room": (-1, 0, 1, 2),
}
_STEPS = {"pause": 0.1, "weight_delay": 0.2, "spacing": 0.05, "burst": 0.4, "forward_wait": 0.2, "weight_wait": 0.2}


def drawn(shop: FlowShop, rng: random.Random) -> Pattern:
    """A random pattern."""
    return Pattern(
        hops=tuple(rng.choice((1.0, 1.0, 1.5, 2.0, 2.5, 3.0)) for _ in range(2 * shop.placement.num_chunks)),
        **{field: rng.choice(values) for field, values in _DRAWS.items()},  # pyright: ignore[reportArgumentType]
    )


def varied(pattern: Pattern, shop: FlowShop, rng: random.Random) -> Pattern:
    """`pattern` with one property changed at random: hops, another field, or shifts of some operations."""
    what = rng.random()
    if what < 0.35:
        hops = list(pattern.hops)
        for _ in range(rng.choice((1, 1, 2))):
            which = rng.randrange(len(hops))
            # Below 0 an operation would be planned before the one that it waits for.
            hops[which] = max(0.0, hops[which] + rng.choice((-0.5, -0.25, -0.1, 0.1, 0.25, 0.5)))
        return replace(pattern, hops=tuple(hops))
    if what < 0.7:
        field = rng.choice(list(_DRAWS))
        value = getattr(pattern, field)
        # Small steps have no meaning for a count, for 0, and for a W that never goes first.
        if field == "room" or not value or value == NEVER_FIRST or rng.random() < 0.5:
            return replace(pattern, **{field: rng.choice(_DRAWS[field])})
        return replace(pattern, **{field: max(0.0, value + rng.gauss(0.0, _STEPS[field]))})
    shifts = list(pattern.shifts or (0,) * shop.num_operations)
    size = shop.interval * rng.choice((0.05, 0.15, 0.5))
    for _ in range(rng.choice((1, 2, 4, 8, shop.num_operations))):
        shifts[rng.randrange(len(shifts))] += int(rng.gauss(0.0, size))
    return replace(pattern, shifts=tuple(shifts))
