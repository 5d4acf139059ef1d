"""Orders near one that is known: its own starts are the keys, moved a little, and its chains start when they did."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.ordering.flow_shop import Shop
from jaxpipe.schedules.ordering.list_scheduler import Guide, Order, greedy
from jaxpipe.schedules.ordering.pattern import Pattern, drawn, plain, varied
from jaxpipe.schedules.schedule import COMPUTE_KINDS, TRANSFER_KINDS, Kind, Schedule


def guide_of(shop: Shop, start: Sequence[int]) -> Guide:
    """What leads `greedy` to the order of `start`, [chain * K + step] in ticks, or to one that is a little better."""
    return Guide(start, start[:: shop.num_steps])


def neighbour(shop: Shop, start: Sequence[int], rng: random.Random) -> Guide:
    """What leads to an order near `start`: some keys moved at random, of a few chains or of one step of many."""
    num_chains, num_steps, interval = shop.num_chains, shop.num_steps, shop.interval
    keys = list(start)
    size = interval * rng.choice((0.1, 0.3, 1.0, 3.0))
    first = rng.randrange(num_chains)
    if rng.random() < 0.5:
        for index in range(first * num_steps, min(num_chains, first + rng.choice((1, 2, 4, 8))) * num_steps):
            keys[index] += int(rng.gauss(0.0, size))
    else:
        step, by = rng.randrange(num_steps), int(rng.gauss(0.0, size))
        for chain in range(rng.choice((0, first)), num_chains):
            keys[chain * num_steps + step] += by
    early = int(interval * rng.choice((0.0, 0.0, 0.0, 0.1, 0.3, 1.0)))
    release = [max(0, at - early) for at in start[::num_steps]]
    if rng.random() < 0.3:
        by = int(rng.gauss(0.0, size))
        for chain in range(first, min(num_chains, first + rng.choice((1, 4, num_chains)))):
            release[chain] = max(0, release[chain] + by)
    return Guide(keys, release, (), rng.choice((0.0, 0.0, 0.3, 0.6)), rng.choice((0.0, 0.0, 0.3, 0.6)))


def starts_in(shop: Shop, schedule: Schedule, costs: Costs, ticks_per_unit: float) -> list[int] | None:
    """[chain * K + step] when the actions of `schedule` start in ticks, or None if `shop` has not the same actions.

    The microbatches of each replica become chains in the order in which they start.
    """
    columns, num_replicas = schedule.columns, schedule.num_replicas
    num_stages, num_steps = schedule.num_stages, shop.num_steps
    backward = Kind.I if shop.is_split else Kind.B
    if columns.is_kind(*TRANSFER_KINDS, Kind.B if shop.is_split else Kind.I).any():
        return None
    begin = np.rint(simulate(schedule, costs).start * ticks_per_unit).astype(np.int64)
    offset = np.zeros(len(Kind), dtype=np.int64)
    offset[backward], offset[Kind.W] = 2 * num_stages - 1, 3 * num_stages - 1
    step = np.where(columns.kind == Kind.F, columns.stage, offset[columns.kind] - columns.stage)
    entry = np.flatnonzero((columns.kind == Kind.F) & (columns.stage == 0))
    start = [0] * (shop.num_chains * num_steps)
    chain_of = np.full(schedule.num_microbatches, -1)
    for replica in range(num_replicas):
        mine = entry[columns.replica[entry] == replica]
        mine = mine[np.argsort(begin[mine], kind="stable")]
        if len(mine) != len(range(replica, shop.num_chains, num_replicas)):
            return None
        chain_of[columns.microbatch[mine]] = replica + num_replicas * np.arange(len(mine))
    for action in np.flatnonzero(columns.is_kind(*COMPUTE_KINDS)).tolist():
        start[chain_of[columns.microbatch[action]] * num_steps + step[action]] = int(begin[action])
    return start


# The search itself. Counts of trials decide when it ends, never a clock, and its random numbers have fixed seeds:
# the same question has the same answer.

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
