"""What all microbatches have in common: when the steps of one are planned, and how far apart microbatches start.

Goes in: a few numbers. Comes out: a `Guide` for `greedy`. Which numbers are good, `capped_search` knows for some
schedules, and the search tries. A pattern says what the building blocks of controllable
memory (Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024) say: how long a microbatch takes for
each hop sets how long each device stores it. Here it is a preference, not a timetable: devices do what is ready.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from jaxpipe.schedules.ordering.flow_shop import Shop
from jaxpipe.schedules.ordering.list_scheduler import Guide

NEVER_FIRST = 1000.0  # intervals: W only where nothing else is ready


@dataclass(frozen=True)
class Pattern:
    """Preferences in a form that can be drawn and varied; intervals are those of `Shop.interval`.

    Attributes:
        hops: [pass] what a step is planned to take, in its own durations; a pass is D steps of a chain.
        turn: intervals between the last F and the first I.
        weight_delay: intervals from the start of an I to that of its W.
        spacing: intervals between the starts of chains; 0 lets them start whenever they can.
        burst: chains that may start before that.
        forward_wait, weight_wait: of `Guide`.
        room: forwards by which the quotas of a device's stages, in proportion to how long each is planned to be stored,
            exceed what fits; no quotas below 0.
        shifts: [step] ticks added to the plan; none if empty.
    """

    hops: tuple[float, ...]
    turn: float = 0.0
    weight_delay: float = NEVER_FIRST
    spacing: float = 0.0
    burst: float = 0.0
    forward_wait: float = 0.0
    weight_wait: float = 0.0
    room: int = -1
    shifts: tuple[int, ...] = ()

    def guide(self, shop: Shop) -> Guide:
        """What devices of `shop` go by."""
        plan, interval = self._plan(shop), shop.interval
        quotas = _quotas(shop, plan, self.room) if self.room >= 0 else ()
        if self.shifts:
            plan = [at + shift for at, shift in zip(plan, self.shifts, strict=True)]
        keys = [chain * interval + at for chain in range(shop.num_chains) for at in plan]
        release = [
            max(0, int((chain - self.burst) * interval * self.spacing)) if self.spacing else 0
            for chain in range(shop.num_chains)
        ]
        return Guide(keys, release, quotas, self.forward_wait, self.weight_wait)

    def _plan(self, shop: Shop) -> list[int]:
        """[step] ticks after the start of its chain."""
        num_stages, num_devices = shop.placement.num_stages, shop.placement.num_devices
        plan, at = [], 0
        for step in range(2 * num_stages):
            if step == num_stages:
                at += int(self.turn * shop.interval)
            plan.append(at)
            at += int(shop.duration[step] * self.hops[step // num_devices])
        delay = int(self.weight_delay * shop.interval)
        return (plan + [at + delay for at in plan[num_stages:]])[: shop.num_steps]


def plain(shop: Shop) -> Pattern:
    """As if nothing ever waited; without quotas, so that `greedy` always comes to an end."""
    return Pattern((1.0,) * (2 * shop.placement.num_chunks))


def _quotas(shop: Shop, plan: list[int], room: int) -> list[list[int]]:
    """[device][slot] forwards it may hold, in proportion to how long the plan stores them; one at least."""
    num_stages = shop.placement.num_stages
    fits = shop.sizes.num_forwards
    last = [plan[2 * num_stages - 1 - stage] + shop.duration[2 * num_stages - 1 - stage] for stage in range(num_stages)]
    quotas = []
    for stages in shop.placement.stages_of:
        stays = [max(1, last[stage] - plan[stage] + shop.duration[-1]) for _, stage in stages]
        shares = [(fits + room) * stay / sum(stays) for stay in stays]
        counts = [max(1, int(share)) for share in shares]
        by_rest = sorted(range(len(shares)), key=lambda slot: counts[slot] - shares[slot])
        for extra in range(fits + room - sum(counts)):
            counts[by_rest[extra % len(counts)]] += 1
        quotas.append([min(count, fits) for count in counts])
    return quotas


# Random patterns for the search: new ones, and variations of a known one.

_DRAWS = {
    "turn": lambda rng: rng.choice((0.0, 0.0, 0.2, 0.4)),
    "weight_delay": lambda rng: rng.choice((-1.0, 0.0, 0.5, 1.0, 2.0, NEVER_FIRST)),
    "spacing": lambda rng: rng.choice((0.0, 0.8, 0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.15)),
    "burst": lambda rng: rng.choice((0.0, 1.0, 2.0, 3.0, 4.0)),
    "forward_wait": lambda rng: rng.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
    "weight_wait": lambda rng: rng.choice((0.0, 0.0, 0.3, 0.6, 1.0)),
    "room": lambda rng: rng.choice((-1, 0, 1, 2)),
}
_STEPS = {"turn": 0.1, "weight_delay": 0.2, "spacing": 0.05, "burst": 0.4, "forward_wait": 0.2, "weight_wait": 0.2}


def drawn(shop: Shop, rng: random.Random) -> Pattern:
    """A pattern at random."""
    return Pattern(
        hops=tuple(rng.choice((1.0, 1.0, 1.5, 2.0, 2.5, 3.0)) for _ in range(2 * shop.placement.num_chunks)),
        **{field: draw(rng) for field, draw in _DRAWS.items()},  # pyright: ignore[reportArgumentType]
    )


def varied(pattern: Pattern, shop: Shop, rng: random.Random) -> Pattern:
    """`pattern` with one thing changed at random: hops, another field, or shifts of some steps."""
    what = rng.random()
    if what < 0.35:
        hops = list(pattern.hops)
        for _ in range(rng.choice((1, 1, 2))):
            which = rng.randrange(len(hops))
            hops[which] = max(0.0, hops[which] + rng.choice((-0.5, -0.25, -0.1, 0.1, 0.25, 0.5)))
        return replace(pattern, hops=tuple(hops))
    if what < 0.7:
        field = rng.choice(list(_DRAWS))
        value = getattr(pattern, field)
        if field == "room" or not value or value == NEVER_FIRST or rng.random() < 0.5:
            return replace(pattern, **{field: _DRAWS[field](rng)})
        return replace(pattern, **{field: max(0.0, value + rng.gauss(0.0, _STEPS[field]))})
    shifts = list(pattern.shifts or (0,) * shop.num_steps)
    size = shop.interval * rng.choice((0.05, 0.15, 0.5))
    for _ in range(rng.choice((1, 2, 4, 8, shop.num_steps))):
        shifts[rng.randrange(len(shifts))] += int(rng.gauss(0.0, size))
    return replace(pattern, shifts=tuple(shifts))
