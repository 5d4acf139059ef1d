"""Which pages a device parks with its partner: the same share of every microbatch.

Goes in: the lifetimes of one row and a bound. Comes out: the share and where EVICT and LOAD stand, or
that the bound cannot be met. The proof of the bound is in `balance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.balance.lifetimes import Lifetime, num_stored, num_within
from jaxpipe.schedules.balance.moves import Move, Plan


class _Stay(NamedTuple):
    """A microbatch that is evicted, in indices of its row's compute actions."""

    lifetime: Lifetime
    leaves: int  # EVICT stands before this one
    lands: int  # LOAD stands before this one


def page_plan(row: Sequence[Lifetime], bound: int) -> Plan | None:
    """Where every microbatch of a row leaves and returns, and the least share that keeps `bound`.

    EVICT stands directly after the F, LOAD one compute action before the backward. A microbatch that
    would not be away during one whole compute action is left at home.

    Args:
        row: lifetimes of a device that stores more than `bound`.
        bound: slots that the device may hold, transit included.

    Returns:
        The plan, or None if not even whole microbatches would do.
    """
    stays = [
        _Stay(lifetime, lifetime.start + 1, lifetime.need - 1) for lifetime in row if lifetime.need - lifetime.start > 3
    ]
    stored = num_stored(row)
    settled = num_within([(stay.leaves + 1, stay.lands - 1) for stay in stays])
    # Where one leaves and another lands during the same action, the transfers follow each other (EVICT stands
    # first): at each moment only one of the two is whole.
    leaving = {stay.leaves for stay in stays}
    for index in leaving & {stay.lands for stay in stays}:
        settled[index] += 1
    share = Fraction(0)
    for num, num_settled in set(zip(stored, settled + [0] * (len(stored) - len(settled)), strict=True)):
        if num > bound:
            if num - bound > num_settled:
                return None
            share = max(share, Fraction(num - bound, num_settled))
    evictions = [Move(stay.leaves, stay.lifetime.forward._replace(kind=Kind.EVICT)) for stay in stays]
    loads = [Move(stay.lands, stay.lifetime.forward._replace(kind=Kind.LOAD)) for stay in stays]
    num_parked = max(num_within([(stay.leaves, stay.lands) for stay in stays]), default=0)
    return Plan((*evictions, *loads), share, share * num_parked)
