"""How long each device stores what its forwards leave: the rows, counted in compute actions.

Goes in: a schedule. Comes out: for each device, from which compute action of its row to which other one
it keeps a (stage, microbatch). `balance` decides on this what to evict; times come from `memory`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple

from jaxpipe.schedules.schedule import COMPUTE_KINDS, Action, Kind, Schedule


class Lifetime(NamedTuple):
    """Storage of one (stage, microbatch), in indices of its row's compute actions."""

    forward: Action
    start: int  # its F
    need: int  # its B or I, which reads it first
    end: int  # its B or W, which gives it back


def lifetimes(schedule: Schedule) -> tuple[tuple[Lifetime, ...], ...]:
    """[device] -> lifetimes in the order of their forwards; `schedule` is legal."""
    return tuple(map(_of_row, schedule.rows))


def num_stored(row: Sequence[Lifetime]) -> list[int]:
    """[compute action] how many (stage, microbatch) the device stores during it."""
    return num_within([(lifetime.start, lifetime.end) for lifetime in row])


def num_within(spans: Sequence[tuple[int, int]]) -> list[int]:
    """[index] how many of `spans`, ends included, it lies in; as long as the last end needs."""
    changes = [0] * (max((last for _, last in spans), default=-1) + 2)
    for first, last in spans:
        changes[first] += 1
        changes[last + 1] -= 1
    return list(accumulate(changes))[:-1]


def _of_row(row: tuple[Action, ...]) -> tuple[Lifetime, ...]:
    start: dict[tuple[int, int], tuple[int, Action]] = {}
    need: dict[tuple[int, int], int] = {}
    end: dict[tuple[int, int], int] = {}
    for index, action in enumerate(action for action in row if action.kind in COMPUTE_KINDS):
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            start[key] = index, action
        else:
            need.setdefault(key, index)
            end[key] = index
    return tuple(Lifetime(action, index, need[key], end[key]) for key, (index, action) in start.items())


# Plans.


class Move(NamedTuple):
    """An EVICT or LOAD that travels during one compute action of its row."""

    before: int  # index of that compute action in its row
    action: Action


class Plan(NamedTuple):
    """What one device evicts and loads.

    Attributes:
        moves: where several travel during the same action, in the order in which they do.
        share: of a microbatch's pages that each move carries.
        most_parked: slots that the partner gives at most, transit included.
    """

    moves: tuple[Move, ...]
    share: Fraction
    most_parked: Fraction


def with_moves(row: Sequence[Action], moves: Sequence[Move]) -> tuple[Action, ...]:
    """The row of a device with `moves` in it; those before the same compute action keep their order."""
    at: dict[int, list[Action]] = defaultdict(list)
    for move in moves:
        at[move.before].append(move.action)
    woven: list[Action] = []
    index = 0
    for action in row:
        if action.kind in COMPUTE_KINDS:
            woven += at[index]
            index += 1
        woven.append(action)
    return tuple(woven)


# By pages: the same share of every microbatch is parked.


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


# By whole microbatches: evict-latest, as in BPipe.


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
