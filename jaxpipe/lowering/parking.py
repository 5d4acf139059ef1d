"""Parking: the rounds in which pages of a balanced schedule travel to the paired device, and back.

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

import numpy as np

from jaxpipe.lowering.permutes import Sends, in_lanes, number_of_equals
from jaxpipe.lowering.rounds import REMOTE_ROUNDS
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Kind, Schedule


@dataclass(frozen=True, eq=False)
class ParkedPages:
    """The T pages that spend part of their lifetime on the paired device.

    Attributes:
        backward: [T] index of the B or I that reads the page, in the columns of `compute_schedule`.
        layer: [T] layer of the stage.
        evict_round: [T] the round in which the page travels to the partner.
        load_round: [T] the round in which the page travels back; later than `evict_round`.
        home, partner: [T] the page's own device, and the paired one.
    """

    backward: np.ndarray
    layer: np.ndarray
    evict_round: np.ndarray
    load_round: np.ndarray
    home: np.ndarray
    partner: np.ndarray

    @cached_property
    def sends(self) -> Sends:
        """All evictions, then all loads."""
        rounds = np.concatenate([self.evict_round, self.load_round])
        source = np.concatenate([self.home, self.partner])
        return in_lanes(rounds, source, np.concatenate([self.partner, self.home]))


NO_PARKED_PAGES = ParkedPages(*np.zeros((6, 0), dtype=int))


def open_rounds(
    compute: Schedule, rounds: np.ndarray, round_type: np.ndarray, lengths: np.ndarray | None
) -> Iterator[np.ndarray]:
    """Whether a device and its partner may exchange pages in a round, [R, D]: several choices, of fewest rounds first.

    They may if any device computes in a round of that type: a transfer hides behind an action. And, if rounds follow
    time, in those types of rounds that have most room for it: the time from when both have reached the beginning of the
    round until one of them must reach its end, where its next action begins.

    Args:
        compute: a schedule of compute actions alone.
        rounds: [A] rounds of its actions.
        round_type: [R] type of each round.
        lengths: [kinds] lengths of actions, as in `periodic_rounds`; None if rounds do not follow time.
    """
    num_rounds, num_devices, columns = len(round_type), compute.num_devices, compute.columns
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
    """[R, D] the time that a device and its partner have for a round; below 0, one waits for the other.

    Args:
        compute: a schedule of compute actions alone.
        rounds: [A] rounds of its actions.
        begin, end: [A] times at which they begin and end.
        num_rounds: R.
    """
    device, shape = compute.columns.device, (num_rounds + 1, compute.num_devices)
    done, begins = np.full(shape, -np.inf), np.full(shape, np.inf)
    done[rounds + 1, device] = end
    begins[rounds, device] = begin
    reached = np.maximum.accumulate(done)[:-1]  # when a device reaches the beginning of the round
    leaves = np.minimum.accumulate(begins[::-1])[::-1][1:]  # when it must reach the end of the round
    partner = [compute.placement.partner_of(each) for each in range(compute.num_devices)]
    return np.minimum(leaves, leaves[:, partner]) - np.maximum(reached, reached[:, partner])


def park_pages(
    schedule: Schedule, compute: Schedule, layers_per_stage: tuple[int, ...], rounds: np.ndarray, is_open: np.ndarray
) -> ParkedPages:
    """Chooses the pages that `schedule` evicts, and the rounds in which they travel.

    Args:
        schedule: a schedule with EVICT and LOAD actions.
        compute: the same schedule without them.
        layers_per_stage: [stage] number of layers.
        rounds: [A] rounds of the actions of `compute`.
        is_open: [R, D] a choice of `open_rounds`.
    """
    columns, moves = compute.columns, schedule.columns
    evictions = _first_evictions(schedule)
    stage, microbatch, home = (each[evictions] for each in (moves.stage, moves.microbatch, moves.device))
    is_f, is_b = columns.is_kind(Kind.F), columns.is_kind(Kind.B, Kind.I)
    backward_of = np.full((schedule.num_stages, schedule.num_microbatches), -1)
    backward_of[columns.stage[is_b], columns.microbatch[is_b]] = np.flatnonzero(is_b)
    backward = backward_of[stage, microbatch]
    forward = dependencies(compute).local[backward]
    num_pages = _num_pages(schedule, layers_per_stage, home, stage)
    pages = []
    for device in range(schedule.num_devices):
        here, own = columns.device == device, np.flatnonzero(home == device)
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
        layer = number_of_equals(i)
        evict_round = open_here[evict[i] + layer % (evict_stop - evict)[i]]
        load_round = open_here[load_stop[i] - 1 - layer % (load_stop - load)[i]]
        partner = np.full_like(i, compute.placement.partner_of(device))
        pages.append((backward[own[i]], layer, evict_round, load_round, home[own[i]], partner))
    return ParkedPages(*(np.concatenate(fields) for fields in zip(*pages, strict=True)))


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

    They are whole numbers, from the running sum rounded down.
    """
    turn = number_of_equals(home, stage)
    fractions = [schedule.parked_of(index) * layers for index, layers in enumerate(layers_per_stage)]
    num_turns = int(turn.max(initial=-1)) + 1
    of_turn = {
        each: np.diff([turn * each.numerator // each.denominator for turn in range(num_turns + 1)])
        for each in set(fractions)
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
    first, stop = np.searchsorted(open_here, forward, "right"), np.searchsorted(open_here, backward, "left")
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
