"""Which whole microbatches a device parks with its partner: evict-latest, as in BPipe.

Goes in: the lifetimes of one row and a bound. Comes out: where EVICT and LOAD stand, or that the bound
cannot be kept. Loads are as late as their backward lets them, evictions as late as the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.balance.lifetimes import Lifetime
from jaxpipe.schedules.balance.moves import Move, Plan


def microbatch_plan(row: Sequence[Lifetime], bound: int, *, policy: str, overlapped: bool) -> Plan | None:
    """Where whole microbatches leave and return so that a row keeps `bound`.

    Backward is first-in first-out, so the latest saved microbatch is the one needed last, and to evict it
    is Belady's rule, which makes the fewest evictions.

    Args:
        row: lifetimes of a device that stores more than `bound`.
        bound: slots that the device may hold.
        policy: "latest" evicts the microbatch whose backward comes last, "oldest" the one whose comes first.
        overlapped: an eviction holds its slot during the compute action after it, a load during the one
            before its backward; if not, transfers take no time and hold nothing.

    Returns:
        The plan, or None if nothing that may leave makes enough room.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966; Kim et al.,
    BPipe, ICML 2023.
    """
    lead = 1 if overlapped else 0  # compute actions between the issue of a transfer and its use
    forward_at = {lifetime.start: i for i, lifetime in enumerate(row)}
    need_at = {lifetime.need: i for i, lifetime in enumerate(row)}
    end_at = {lifetime.end: i for i, lifetime in enumerate(row)}
    choose = {"latest": max, "oldest": min}[policy]
    home: set[int] = set()  # indices in `row`, settled, before the compute action `index`
    away: set[int] = set()
    moves: list[Move] = []
    most_parked = 0
    for index in range(max(end_at) + 1):
        landing = {need_at[index + lead]} & away if index + lead in need_at else set()
        # What must have room once an eviction made now has left: at the action `index + lead`.
        stored = len(home) + len(landing) + sum(i in forward_at for i in range(index, index + lead + 1))
        if overlapped:
            stored += (need_at.get(index + 2) in away) - (index in end_at)
        leaving = set()
        while stored > bound:
            # What is needed within the next actions would have to turn round at once.
            free = [i for i in home if row[i].need > index + 2 * lead]
            if not free:
                return None
            evicted = choose(free, key=lambda i: row[i].need)
            home.remove(evicted)
            leaving.add(evicted)
            stored -= 1
        if overlapped and len(home) + len(leaving) + len(landing) + (index in forward_at) > bound:
            return None
        # While transfers travel, the partner has less room than home, so a load goes first; without, the
        # load needs the slot that the eviction leaves.
        loads = [Move(index, row[i].forward._replace(kind=Kind.LOAD)) for i in landing]
        evictions = [Move(index, row[i].forward._replace(kind=Kind.EVICT)) for i in sorted(leaving)]
        moves += loads + evictions if overlapped else evictions + loads
        most_parked = max(most_parked, len(away), len(away) + len(leaving) - len(landing))
        away = (away | leaving) - landing
        home |= landing
        if index in forward_at:
            home.add(forward_at[index])
        if index in end_at:
            home.remove(end_at[index])
    return Plan(tuple(moves), Fraction(1), Fraction(most_parked))
