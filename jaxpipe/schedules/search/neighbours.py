"""Orders near one that is known: its own starts are the keys, moved a little, and its chains start when they did."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from jaxpipe.schedules.action import COMPUTE_KINDS, MOVE_KINDS, Kind
from jaxpipe.schedules.orders.device import Guide
from jaxpipe.schedules.orders.shop import Shop
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.simulate import Costs, simulate


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
    if columns.is_kind(*MOVE_KINDS, Kind.B if shop.is_split else Kind.I).any():
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
