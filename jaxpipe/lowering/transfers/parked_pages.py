"""Parked pages: the rounds in which pages of a balanced schedule travel to the paired device, and back.

EVICT and LOAD change nothing in the rounds of compute actions. A page leaves between its F and the next F of its
device, and comes back between the previous backward and its own; the pages of a microbatch are spread over the rounds
of that time in which the two devices may exchange pages (`open_rounds`). A page is read at the end of the round before,
travels, and is stored at the end of its round. Evictions are as early and loads as late as possible, so that the space
that one microbatch frees makes room for the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from jaxpipe.lowering.pages import PageMoves
from jaxpipe.lowering.permutes import Permutes, Sends, in_lanes, lane_grids, number_of_equals
from jaxpipe.lowering.rounds import REMOTE_ROUNDS
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Action, Kind, Schedule


@dataclass(frozen=True, eq=False)
class PageGrids:
    """The pages that each device sends and receives, round by round."""

    send_page: np.ndarray  # [R, D, lane] page read at the end of the round, to travel in the next
    num_sends: np.ndarray  # [R, D] lanes that are used
    recv_page: np.ndarray  # [R, D, lane] page in which the arrived page is stored
    num_recvs: np.ndarray  # [R, D] lanes that are used


@dataclass(frozen=True, eq=False)
class MovedPages(Transfer[RoundTable]):
    """The T pages that spend part of their lifetime away from their device: EVICT and LOAD."""

    moves: PageMoves  # where and when

    unit = "page"
    unit_bytes: ClassVar = {"page": lambda sizes: sizes.page}

    def actions(self, table: RoundTable) -> set[tuple[int, int, Action]]:
        """EVICT and LOAD of each microbatch, in each round in which some of its pages begin or end to be away."""
        moves = self.moves
        columns = table.schedule.columns
        of_page = (values[moves.backward] for values in (columns.stage, columns.microbatch, columns.replica))
        named = np.stack([moves.home, *of_page], axis=1).tolist()
        return {
            (round_, home, Action(kind, *of_action))
            for kind, rounds in ((Kind.EVICT, moves.leaves), (Kind.LOAD, moves.returns))
            for round_, (home, *of_action) in zip(rounds.tolist(), named, strict=True)
        }

    @property
    def page_moves(self) -> PageMoves:
        """The same."""
        return self.moves


@dataclass(frozen=True, eq=False)
class ParkedPages(MovedPages):
    """The T pages that spend part of their lifetime on the paired device."""

    name = "parked_pages"

    @cached_property
    def sends(self) -> Sends:
        """All evictions, then all loads."""
        moves = self.moves
        rounds = np.concatenate([moves.leaves, moves.returns])
        source = np.concatenate([moves.home, moves.host])
        return in_lanes(rounds, source, np.concatenate([moves.host, moves.home]))

    def payloads(self, table: RoundTable) -> Payloads:
        """Each way of each page."""
        sends = self.sends
        return Payloads(sends.round, sends.source, sends.target, sends.lane, size=round(Costs.slot_messages))

    def permutes(self, table: RoundTable) -> Permutes:
        """[type][lane] -> pairs of the permute that carries a page of each source."""
        return self.sends.permutes(table.round_type, table.num_types)

    def works_in(self, table: RoundTable) -> np.ndarray:
        """Pages are read at the end of the round before they travel."""
        return table.grids[self.name].num_sends.any(axis=1)

    def duration(self, links: np.ndarray, costs: Costs, layers_per_stage: tuple[int, ...]) -> np.ndarray:
        """A page has one layer of a slot."""
        return links * costs.slot_messages / min(layers_per_stage)

    def grids(self, table: RoundTable) -> PageGrids:
        """The pages to send and to receive, at the end of each round."""
        before, away, after = table.pages.of_moves
        return PageGrids(
            *lane_grids(
                self.sends,
                np.concatenate([before, away]),
                np.concatenate([away, after]),
                num_rounds=table.num_rounds,
                num_devices=table.schedule.num_devices,
                num_lanes=table.num_lanes(self.name),
            )
        )

    def buffers(self, table: RoundTable) -> dict[str, int]:
        """A page that travels during an action is held twice: the copy that is sent, and the one that lands."""
        return {"page": 2 * table.num_lanes(self.name)}


def open_rounds(
    compute: Schedule, rounds: np.ndarray, round_type: np.ndarray, lengths: np.ndarray | None
) -> Iterator[np.ndarray]:
    """Whether a device and its partner may exchange pages in a round, [R, D]: several choices, of fewest rounds first.

    They may if any device computes in a round of that type: a transfer hides behind an action. And, if rounds follow
    time, in those types of rounds that have most room for it: the time from when both have reached the beginning of the
    round until one of them must reach its end, where its next action begins.
    """
    num_rounds = len(round_type)
    num_devices = compute.num_devices
    columns = compute.columns
    is_busy = np.isin(round_type, round_type[rounds])[:, None]
    if lengths is None:
        yield np.repeat(is_busy, num_devices, axis=1)
        return
    # With rounds as units of time, an action ends two rounds after its own.
    begin = rounds + 2 - REMOTE_ROUNDS * lengths[columns.kind]
    room = room_to_meet(compute, rounds, begin, rounds + 2, num_rounds)
    busy_types = np.unique(round_type[rounds])
    of_type = np.stack([room[round_type == index].min(axis=0) for index in busy_types])  # a type has the same pairs
    for least in np.sort(of_type, axis=0)[::-1]:
        is_roomy = of_type >= np.maximum(least, 0)
        is_open = np.zeros((num_rounds, num_devices), dtype=bool)
        for index, open_here in zip(busy_types, is_roomy | ~is_roomy.any(axis=0), strict=True):
            is_open[round_type == index] = open_here
        yield is_open


def room_to_meet(
    compute: Schedule, rounds: np.ndarray, begin: np.ndarray, end: np.ndarray, num_rounds: int
) -> np.ndarray:
    """[R, D] the time that a device and its partner have for a round; below 0, one waits for the other."""
    device = compute.columns.device
    shape = (num_rounds + 1, compute.num_devices)
    done = np.full(shape, -np.inf)
    begins = np.full(shape, np.inf)
    # An action of round r ends before round r + 1 begins.
    done[rounds + 1, device] = end
    begins[rounds, device] = begin
    reached = np.maximum.accumulate(done)[:-1]  # when a device reaches the beginning of the round
    leaves = np.minimum.accumulate(begins[::-1])[::-1][1:]  # when it must reach the end of the round
    partner = [compute.placement.partner_of(device) for device in range(compute.num_devices)]
    return np.minimum(leaves, leaves[:, partner]) - np.maximum(reached, reached[:, partner])


def park_pages(
    schedule: Schedule,
    compute: Schedule,
    layers_per_stage: tuple[int, ...],
    recomputed: tuple[int, ...],
    rounds: np.ndarray,
    is_open: np.ndarray,
) -> PageMoves:
    """Chooses the pages that `schedule` evicts, and rounds of `is_open`, [R, D], in which they travel.

    Layers that are computed again, [S] the first `recomputed` of each stage, have small pages, which stay.
    """
    columns = compute.columns
    is_f = columns.is_kind(Kind.F)
    is_b = columns.is_kind(*BACKWARD_KINDS)
    forward, backward, home, num_pages, first = movable_pages(schedule, compute, layers_per_stage, recomputed)
    pages = []
    for device in range(schedule.num_devices):
        here = columns.device == device
        own = np.flatnonzero(home == device)
        open_here = np.flatnonzero(is_open[:, device])
        evict, evict_stop, load, load_stop = _windows(
            rounds[forward[own]],
            rounds[backward[own]],
            np.sort(rounds[here & is_f]),
            np.sort(rounds[here & is_b]),
            open_here,
        )
        is_long_enough = (evict < evict_stop) & (load < load_stop)  # to leave and come back
        i = np.repeat(np.arange(len(own)), np.where(is_long_enough, num_pages[own], 0))
        # The first layers travel: `allocate_pages` counts on it.
        layer = number_of_equals(i)
        evict_round = open_here[evict[i] + layer % (evict_stop - evict)[i]]
        load_round = open_here[load_stop[i] - 1 - layer % (load_stop - load)[i]]
        partner = np.full_like(i, compute.placement.partner_of(device))
        pages.append((backward[own[i]], first[own[i]] + layer, evict_round, load_round, home[own[i]], partner))
    return PageMoves(*(np.concatenate(fields) for fields in zip(*pages, strict=True)))


def movable_pages(
    schedule: Schedule, compute: Schedule, layers_per_stage: tuple[int, ...], recomputed: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """[E] of each (stage, microbatch) that is evicted: forward, backward, device, number of pages, and their first."""
    first = np.array(recomputed or (0,) * schedule.num_stages)
    saving = tuple((np.array(layers_per_stage) - first).tolist())
    columns = compute.columns
    moves = schedule.columns
    evictions = _first_evictions(schedule)
    stage, microbatch, home = (values[evictions] for values in (moves.stage, moves.microbatch, moves.device))
    is_b = columns.is_kind(*BACKWARD_KINDS)
    backward_of = np.full((schedule.num_stages, schedule.num_microbatches), -1)
    backward_of[columns.stage[is_b], columns.microbatch[is_b]] = np.flatnonzero(is_b)
    backward = backward_of[stage, microbatch]
    forward = dependencies(compute).local[backward]
    return forward, backward, home, _num_pages(schedule, saving, home, stage), first[stage]


def _first_evictions(schedule: Schedule) -> np.ndarray:
    """The first EVICT of every slot, in the columns of `schedule`; one that is evicted twice stays away in between."""
    columns = schedule.columns
    evictions = np.flatnonzero(columns.is_kind(Kind.EVICT))
    slot = columns.stage[evictions] * schedule.num_microbatches + columns.microbatch[evictions]
    return np.sort(evictions[np.unique(slot, return_index=True)[1]])


def _num_pages(
    schedule: Schedule, layers_per_stage: tuple[int, ...], home: np.ndarray, stage: np.ndarray
) -> np.ndarray:
    """[E] pages of each eviction of `stage` from `home`, [E] each: `parked` of the layers on average.

    Numbers of pages are whole, from the running sum rounded down.
    """
    turn = number_of_equals(home, stage)
    fractions = [schedule.parked_of(index) * layers for index, layers in enumerate(layers_per_stage)]
    num_turns = int(turn.max(initial=-1)) + 1
    of_turn = {
        share: np.diff([turn * share.numerator // share.denominator for turn in range(num_turns + 1)])
        for share in set(fractions)
    }
    return np.stack([of_turn[fraction] for fraction in fractions])[stage, turn]


def _windows(
    forward: np.ndarray, backward: np.ndarray, forwards: np.ndarray, backwards: np.ndarray, open_here: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The rounds in which the pages of E microbatches may leave, and those in which they may return.

    Args:
        forward, backward: [E] rounds of each microbatch's own F and backward.
        forwards, backwards: sorted rounds of all F and all backwards on their device.
        open_here: sorted rounds in which the device and its partner may exchange pages.

    Returns:
        Four times [E] indices of `open_here`: the first round in which pages may leave, and the one after the last; the
        first in which they may return, and the one after the last.

    Example:
        F in rounds 0, 4, 8 and backwards in 7, 12, 16. The pages of microbatch 1, whose F is in round 4 and whose
        backward in 12, leave in rounds 5 to 8, before or during the next F, and return in 7 to 11. The windows
        overlap, so the first gets half of the rounds in between, or one more, and the second the others.

        >>> forwards, backwards = np.array([0, 4, 8]), np.array([7, 12, 16])
        >>> windows = _windows(np.array([4]), np.array([12]), forwards, backwards, np.arange(17))
        >>> [each.item() for each in windows]
        [5, 9, 9, 12]
    """
    first = np.searchsorted(open_here, forward, "right")
    stop = np.searchsorted(open_here, backward, "left")
    stop = np.maximum(first, stop)
    evict_stop = np.searchsorted(open_here, _following(forwards, forward), "right").clip(first, stop)
    load = np.searchsorted(open_here, -_following(-backwards[::-1], -backward), "left").clip(first, stop)
    half = first + (stop - first + 1) // 2
    overlap = (evict_stop == first) | (load == stop) | (evict_stop > load)
    return first, np.where(overlap, half, evict_stop), np.where(overlap, half, load), stop


def _following(rounds: np.ndarray, own: np.ndarray) -> np.ndarray:
    """[E] the rounds after `own`, [E], in sorted `rounds`; after the last, extrapolated by the distance before it."""
    last = rounds[-1] + (rounds[-1] - rounds[-2] if len(rounds) > 1 else 1)
    return np.append(rounds, last)[np.searchsorted(rounds, own) + 1]
