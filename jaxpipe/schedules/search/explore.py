"""The search for a short order: patterns at random, the best of them varied, and orders near the best ones.

Goes in: shops, one for each placement. Comes out: orders, each the best of its shop. Counts of trials decide when it
ends, never a clock, and its random numbers have fixed seeds: the same question has the same answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jaxpipe.schedules.orders.device import Guide
from jaxpipe.schedules.orders.greedy import Order, greedy
from jaxpipe.schedules.orders.pattern import Pattern, plain
from jaxpipe.schedules.orders.shop import Shop
from jaxpipe.schedules.search.neighbours import guide_of, neighbour
from jaxpipe.schedules.search.variation import drawn, varied

_DRAWN, _VARIED, _NEAR = 0.25, 0.45, 0.3  # shares of the trials
_PROMISING = (3, 2, 1)  # shops that are searched further, one time after the other
_NEW = 0.05  # of the variations, the share of new draws


@dataclass
class _Seeker:
    """A shop, the best order known of it, and the best pattern, which may lead to a longer one."""

    shop: Shop
    rng: random.Random
    order: Order | None = None
    pattern: Pattern | None = None
    pattern_makespan: int = sys.maxsize - 1

    @property
    def makespan(self) -> int:
        return self.order.makespan if self.order else sys.maxsize - 1

    def try_pattern(self, pattern: Pattern) -> None:
        found = greedy(self.shop, pattern.guide(self.shop), self.pattern_makespan + 1)
        if found:
            self.pattern, self.pattern_makespan = pattern, found.makespan
            if found.makespan <= self.makespan:
                self.order = found

    def try_guide(self, guide: Guide) -> None:
        self.order = greedy(self.shop, guide, self.makespan + 1) or self.order

    def draw(self) -> None:
        self.try_pattern(drawn(self.shop, self.rng))

    def vary(self) -> None:
        if self.pattern is None or self.rng.random() < _NEW:
            self.draw()
        else:
            self.try_pattern(varied(self.pattern, self.shop, self.rng))

    def move(self) -> None:
        assert self.order
        self.try_guide(neighbour(self.shop, self.order.start, self.rng))


def explore(
    shops: Sequence[Shop],
    known: Callable[[Shop], Iterable[Sequence[int]]],
    *,
    num_trials: int,
    longest: int = sys.maxsize,
    seed: int = 0,
) -> list[tuple[Shop, Order]]:
    """Returns the best order found for each shop, the shortest first.

    Args:
        shops: of one problem.
        known: starts, [chain * K + step] in ticks, of orders that fit a shop.
        num_trials: orders that are made, those cut short because they are too long included.
        longest: ticks of a schedule that is there already; shops that cannot be below are not searched.
        seed: of the random numbers.
    """
    seekers = [_Seeker(shop, random.Random(seed + number)) for number, shop in enumerate(shops)]
    for seeker in seekers:
        seeker.try_pattern(plain(seeker.shop))
        for start in known(seeker.shop):
            seeker.try_guide(guide_of(seeker.shop, start))

    def run(step: Callable[[_Seeker], None], most: int, trials: int) -> None:
        """`step` for each of the `most` seekers with the shortest orders that may still matter."""
        goal = min([longest, *(each.makespan for each in seekers)])
        promising = sorted((each for each in seekers if each.shop.least_makespan() < goal), key=lambda x: x.makespan)
        for seeker in promising[:most]:
            for _ in range(trials // min(most, len(promising))):
                step(seeker)

    run(_Seeker.draw, len(seekers), int(num_trials * _DRAWN))
    for step, share in ((_Seeker.vary, _VARIED), (_Seeker.move, _NEAR)):
        for most in _PROMISING:
            run(step, most, int(num_trials * share / len(_PROMISING)))
    found = [(seeker.shop, seeker.order) for seeker in seekers if seeker.order]
    return sorted(found, key=lambda each: each[1].makespan)
