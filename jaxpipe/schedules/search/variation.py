"""Patterns at random: new ones, and those near one that is known."""

from __future__ import annotations

import random
from dataclasses import replace

from jaxpipe.schedules.orders.pattern import NEVER_FIRST, Pattern
from jaxpipe.schedules.orders.shop import Shop

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
