"""Eviction plans: the activations that a device parks with its partner, and when, so as to keep a bound.

Goes in: how long each device stores its activations, counted in the compute actions of its row, and a bound in slots.
Comes out: where EVICT and LOAD stand in the row, or that the bound cannot be kept. The proof that the default bound can
be kept is in `balance`.
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

    forward: Action  # the F that fills it
    start: int  # index of its F
    need: int  # index of its B or I, which reads the activations first
    end: int  # index of its B or W, which gives them back


def activation_lifetimes(schedule: Schedule) -> tuple[tuple[Lifetime, ...], ...]:
    """[device] -> lifetimes of its activations, in the order of their forwards; `schedule` is legal.

    Example:
        >>> from jaxpipe.schedules import build
        >>> schedule = build("zb_h1", num_devices=2, num_microbatches=2)
        >>> print(*schedule.rows[0])
        0F0 0F1 0I0 0W0 0I1 0W1
        >>> for lifetime in activation_lifetimes(schedule)[0]:
        ...     print(lifetime.forward, *lifetime[1:])
        0F0 0 2 3
        0F1 1 4 5
    """
    return tuple(map(_of_row, schedule.rows))


def num_within(spans: Sequence[tuple[int, int]]) -> list[int]:
    """[index] number of `spans`, both ends included, that contain it; up to the last end.

    Example:
        >>> num_within([(0, 3), (1, 5)])
        [1, 2, 2, 2, 1, 1]
    """
    # Prefix sums: each span adds one where it begins and takes it off behind its end.
    changes = [0] * (max((last for _, last in spans), default=-1) + 2)
    for first, last in spans:
        changes[first] += 1
        changes[last + 1] -= 1
    # The last entry is behind all spans, where only the decrement is.
    return list(accumulate(changes))[:-1]


def _of_row(row: tuple[Action, ...]) -> tuple[Lifetime, ...]:
    """The lifetimes of one row."""
    start: dict[tuple[int, int], tuple[int, Action]] = {}
    need: dict[tuple[int, int], int] = {}
    end: dict[tuple[int, int], int] = {}
    for index, action in enumerate(action for action in row if action.kind in COMPUTE_KINDS):
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            start[key] = index, action
        else:
            # The first reader needs the activations, the last one gives them back; a B is both.
            need.setdefault(key, index)
            end[key] = index
    return tuple(Lifetime(action, index, need[key], end[key]) for key, (index, action) in start.items())


# ---- Plans


class PlacedTransfer(NamedTuple):
    """An EVICT or LOAD and its place in a row."""

    before: int  # index of the compute action of the row during which it travels
    action: Action


class EvictionPlan(NamedTuple):
    """The evictions and loads of one device."""

    # EVICT and LOAD with their places; those during the same action are in the order of travel.
    transfers: tuple[PlacedTransfer, ...]
    share: Fraction  # fraction of a microbatch's pages that each transfer carries
    most_parked: Fraction  # the most slots that the partner gives, transit included


def with_transfers(row: Sequence[Action], transfers: Sequence[PlacedTransfer]) -> tuple[Action, ...]:
    """The row of a device with `transfers` in it; those before the same compute action keep their order."""
    at: dict[int, list[Action]] = defaultdict(list)
    for transfer in transfers:
        at[transfer.before].append(transfer.action)
    result: list[Action] = []
    index = 0
    for action in row:
        if action.kind in COMPUTE_KINDS:
            result += at[index]
            index += 1
        result.append(action)
    return tuple(result)


# ---- By pages: the same share of every microbatch is parked


class _Stay(NamedTuple):
    """A microbatch that is evicted, in indices of its row's compute actions."""

    lifetime: Lifetime
    leaves: int  # index of the action that its EVICT precedes
    lands: int  # index of the action that its LOAD precedes


def page_plan(row: Sequence[Lifetime], bound: int) -> EvictionPlan | None:
    """The plan with the least share of each microbatch that lets a row keep `bound`.

    EVICT stands directly after the F, LOAD one compute action before the backward. A microbatch that would not be away
    during one whole compute action stays.

    Args:
        bound: slots that the device may hold, transit included.

    Returns:
        The plan, or None if not even whole microbatches suffice.
    """
    stays = [
        # Away from after its eviction to before its load: more than three apart, that is a whole action.
        _Stay(lifetime, lifetime.start + 1, lifetime.need - 1)
        for lifetime in row
        if lifetime.need - lifetime.start > 3
    ]
    stored = num_within([(lifetime.start, lifetime.end) for lifetime in row])
    settled = num_within([(stay.leaves + 1, stay.lands - 1) for stay in stays])
    # If one leaves and another lands during the same action, the transfers follow each other (EVICT is
    # first): at each moment only one of the two is whole.
    leaving = {stay.leaves for stay in stays}
    for index in leaving & {stay.lands for stay in stays}:
        settled[index] += 1
    # While more than `bound` are stored, the parked shares must cover the excess: share x settled >= excess.
    share = Fraction(0)
    for num, num_settled in set(zip(stored, settled + [0] * (len(stored) - len(settled)), strict=True)):
        if num > bound:
            # Even whole microbatches, a share of 1, do not make enough room.
            if num - bound > num_settled:
                return None
            share = max(share, Fraction(num - bound, num_settled))
    # Evictions before loads: of those during one action the eviction travels first.
    evictions = [PlacedTransfer(stay.leaves, stay.lifetime.forward._replace(kind=Kind.EVICT)) for stay in stays]
    loads = [PlacedTransfer(stay.lands, stay.lifetime.forward._replace(kind=Kind.LOAD)) for stay in stays]
    num_parked = max(num_within([(stay.leaves, stay.lands) for stay in stays]), default=0)
    return EvictionPlan((*evictions, *loads), share, share * num_parked)


# ---- By whole microbatches: evict-latest, as in BPipe


def microbatch_plan(row: Sequence[Lifetime], bound: int, *, policy: str, overlapped: bool) -> EvictionPlan | None:
    """The plan that moves whole microbatches so that a row keeps `bound`.

    Loads are as late as their backward allows, evictions as late as the bound allows. Backward is first-in first-out,
    so the latest saved microbatch is the one needed last; evicting it is Belady's rule, which needs the fewest
    evictions.

    Args:
        policy: "latest" evicts the microbatch whose backward comes last, "oldest" the one whose backward comes first.
        overlapped: an eviction holds its slot during the compute action after it, a load during the one
            before its backward; if not, transfers take no time and hold nothing.

    Returns:
        The plan, or None if no eviction makes enough room.

    Source: Belady, A study of replacement algorithms for a virtual-storage computer, 1966; Kim et al.,
    BPipe, ICML 2023.
    """
    lead = 1 if overlapped else 0  # compute actions between the issue of a transfer and its use
    forward_at = {lifetime.start: i for i, lifetime in enumerate(row)}
    need_at = {lifetime.need: i for i, lifetime in enumerate(row)}
    end_at = {lifetime.end: i for i, lifetime in enumerate(row)}
    choose = {"latest": max, "oldest": min}[policy]
    home: set[int] = set()  # microbatches on the device before the compute action `index`, as indices in `row`
    away: set[int] = set()
    transfers: list[PlacedTransfer] = []
    most_parked = 0
    for index in range(max(end_at) + 1):
        landing = {need_at[index + lead]} & away if index + lead in need_at else set()
        # The slots that need room once an eviction made now has left: at the action `index + lead`.
        stored = len(home) + len(landing) + sum(i in forward_at for i in range(index, index + lead + 1))
        if overlapped:
            # At the next action a load is due that holds a slot already, and what ends now holds none.
            stored += (need_at.get(index + 2) in away) - (index in end_at)
        leaving = set()
        while stored > bound:
            # A microbatch needed within the next actions would have to return at once.
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
        loads = [PlacedTransfer(index, row[i].forward._replace(kind=Kind.LOAD)) for i in landing]
        evictions = [PlacedTransfer(index, row[i].forward._replace(kind=Kind.EVICT)) for i in sorted(leaving)]
        transfers += loads + evictions if overlapped else evictions + loads
        # Before the transfers and after them: in between, the order of travel keeps the partner below the larger.
        most_parked = max(most_parked, len(away), len(away) + len(leaving) - len(landing))
        away = (away | leaving) - landing
        home |= landing
        if index in forward_at:
            home.add(forward_at[index])
        if index in end_at:
            home.remove(end_at[index])
    return EvictionPlan(tuple(transfers), Fraction(1), Fraction(most_parked))
