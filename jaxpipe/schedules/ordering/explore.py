"""The search for a short order: random patterns, variations of the best ones, and orders near the best ones.

Goes in: flow shops, one for each placement. Comes out: the best order of each. Counts of trials decide when the search
ends, never a clock, and its random numbers have fixed seeds: the same question has the same answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.ordering.flow_shop import FlowShop
from jaxpipe.schedules.ordering.list_scheduler import Guide, ListSchedule, list_schedule
from jaxpipe.schedules.ordering.pattern import Pattern, drawn, plain, varied
from jaxpipe.schedules.schedule import COMPUTE_KINDS, HEAD_KINDS, PARKING_KINDS, Kind, Schedule


def neighbour(shop: FlowShop, start: Sequence[int], rng: random.Random) -> Guide:
    """A guide to an order near `start`, [action] in ticks: some keys change at random.

    Either all keys of a few microbatches change, or those of one operation of many microbatches.
    """
    num_microbatches = shop.num_microbatches
    num_operations = shop.num_operations
    interval = shop.interval
    keys = list(start)
    size = interval * rng.choice((0.1, 0.3, 1.0, 3.0))
    first = rng.randrange(num_microbatches)
    if rng.random() < 0.5:
        for index in range(
            first * num_operations, min(num_microbatches, first + rng.choice((1, 2, 4, 8))) * num_operations
        ):
            keys[index] += int(rng.gauss(0.0, size))
    else:
        operation = rng.randrange(num_operations)
        later = int(rng.gauss(0.0, size))
        for microbatch in range(rng.choice((0, first)), num_microbatches):
            keys[microbatch * num_operations + operation] += later
    early = int(interval * rng.choice((0.0, 0.0, 0.0, 0.1, 0.3, 1.0)))
    release = [max(0, at - early) for at in start[::num_operations]]
    if rng.random() < 0.3:
        later = int(rng.gauss(0.0, size))
        for microbatch in range(first, min(num_microbatches, first + rng.choice((1, 4, num_microbatches)))):
            release[microbatch] = max(0, release[microbatch] + later)
    return Guide(keys, release, (), rng.choice((0.0, 0.0, 0.3, 0.6)), rng.choice((0.0, 0.0, 0.3, 0.6)))


def starts_in(shop: FlowShop, schedule: Schedule, costs: Costs, ticks_per_unit: float) -> list[int] | None:
    """The starts of the actions of `schedule` in ticks, [action of `shop`]; None if `shop` has others beside S and T.

    Each replica's microbatches are numbered in the order in which they start.
    """
    columns = schedule.columns
    num_replicas = schedule.num_replicas
    num_stages = schedule.num_stages
    num_operations = shop.num_operations
    # The backward that a flow shop of this kind numbers from S on; the other kind has no number in it.
    backward = Kind.I if shop.is_split else Kind.B
    if columns.is_kind(*PARKING_KINDS, Kind.B if shop.is_split else Kind.I).any():
        return None
    begin = np.rint(simulate(schedule, costs).start * ticks_per_unit).astype(np.int64)
    offset = np.zeros(len(Kind), dtype=np.int64)
    # I and W run over the stages in reverse, so that their operations count down from these.
    offset[backward] = 2 * num_stages - 1
    offset[Kind.W] = 3 * num_stages - 1
    operation = np.where(columns.kind == Kind.F, columns.stage, offset[columns.kind] - columns.stage)
    entry = np.flatnonzero((columns.kind == Kind.F) & (columns.stage == 0))
    start = [0] * (shop.num_microbatches * num_operations)
    microbatch_of = np.full(schedule.num_microbatches, -1)
    for replica in range(num_replicas):
        entries = entry[columns.replica[entry] == replica]
        entries = entries[np.argsort(begin[entries], kind="stable")]
        # In a flow shop microbatch m is of replica m % R: a schedule with another division has no place in it.
        if len(entries) != len(range(replica, shop.num_microbatches, num_replicas)):
            return None
        microbatch_of[columns.microbatch[entries]] = replica + num_replicas * np.arange(len(entries))
    for action in np.flatnonzero(columns.is_kind(*COMPUTE_KINDS - HEAD_KINDS)).tolist():
        start[microbatch_of[columns.microbatch[action]] * num_operations + operation[action]] = int(begin[action])
    return start


# ---- The search

# Fractions of the trials: patterns drawn anew, variations of good ones, orders near the best one.
_DRAWN = 0.25
_VARIED = 0.45
_NEAR = 0.3
_PROMISING = (3, 2, 1)  # numbers of shops that are searched further, by phase
_NEW = 0.05  # fraction of new draws among the variations


@dataclass
class _Seeker:
    """A flow shop, its best known order, and its best pattern, which may lead to a longer order than that."""

    shop: FlowShop
    rng: random.Random
    order: ListSchedule | None = None
    pattern: Pattern | None = None
    # So that `+ 1` is still a machine integer, above any makespan.
    pattern_makespan: int = sys.maxsize - 1

    @property
    def makespan(self) -> int:
        return self.order.makespan if self.order else sys.maxsize - 1

    def try_pattern(self, pattern: Pattern) -> None:
        # `+ 1` accepts orders that are as long: the search drifts to other patterns and stays on no plateau.
        order = list_schedule(self.shop, pattern.guide(self.shop), self.pattern_makespan + 1)
        if order:
            self.pattern = pattern
            self.pattern_makespan = order.makespan
            if order.makespan <= self.makespan:
                self.order = order

    def try_guide(self, guide: Guide) -> None:
        self.order = list_schedule(self.shop, guide, self.makespan + 1) or self.order

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
    shops: Sequence[FlowShop],
    known: Callable[[FlowShop], Iterable[Sequence[int]]],
    *,
    num_trials: int,
    longest: int = sys.maxsize,
) -> list[tuple[FlowShop, ListSchedule]]:
    """Returns the best order found for each flow shop, the shortest first."""
    # A stream of its own for each shop: what one draws does not depend on how many there are.
    seekers = [_Seeker(shop, random.Random(number)) for number, shop in enumerate(shops)]
    for seeker in seekers:
        seeker.try_pattern(plain(seeker.shop))
        for start in known(seeker.shop):
            # Each microbatch is released at the start of its first F, every K-th entry.
            seeker.try_guide(Guide(start, start[:: seeker.shop.num_operations]))

    def search(trial: Callable[[_Seeker], None], most: int, trials: int) -> None:
        """Makes trials with each of the `most` seekers that have the shortest orders and may still win."""
        goal = min([longest, *(seeker.makespan for seeker in seekers)])
        may_win = (seeker for seeker in seekers if seeker.shop.least_makespan() < goal)
        promising = sorted(may_win, key=lambda seeker: seeker.makespan)
        for seeker in promising[:most]:
            # Whole trials for each; the rest of the division is left undone.
            for _ in range(trials // min(most, len(promising))):
                trial(seeker)

    search(_Seeker.draw, len(seekers), int(num_trials * _DRAWN))
    for trial, fraction in ((_Seeker.vary, _VARIED), (_Seeker.move, _NEAR)):
        # Fewer and fewer shops, each with more trials, as it shows which one wins.
        for most in _PROMISING:
            search(trial, most, int(num_trials * fraction / len(_PROMISING)))
    orders = [(seeker.shop, seeker.order) for seeker in seekers if seeker.order]
    return sorted(orders, key=lambda pair: pair[1].makespan)
