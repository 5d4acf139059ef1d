"""Parking: the rounds in which pages of a balanced schedule travel to the paired device, and back.

EVICT and LOAD change nothing in the rounds of compute actions. A page leaves between its F and the next F of its
device, and comes back between the previous backward and its own; the pages of a microbatch are spread over the rounds
of that time in which the two devices may exchange pages (`open_rounds`). A page is read at the end of the round before,
travels, and is stored at the end of its round. Evictions are as early and loads as late as possible, so that the space
that one microbatch frees makes room for the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import floor

import numpy as np

from jaxpipe.lowering.permutes import Sends, in_lanes
from jaxpipe.lowering.rounds import REMOTE_ROUNDS
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Action, Columns, Kind, Schedule


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
    columns, forward_of = compute.columns, dependencies(compute).local
    is_f, is_b = columns.is_kind(Kind.F), columns.is_kind(Kind.B, Kind.I)
    backward_of = dict(zip(_keys(columns, is_b), np.flatnonzero(is_b).tolist(), strict=True))
    pages = []
    for device, row in enumerate(schedule.rows):
        here, partner = columns.device == device, compute.placement.partner_of(device)
        forwards, backwards = np.sort(rounds[here & is_f]), np.sort(rounds[here & is_b])
        num_evicted: dict[int, int] = defaultdict(int)
        evicted: set[Action] = set()
        for action in row:
            if action.kind is not Kind.EVICT or action in evicted:
                continue  # a slot that is evicted twice stays away in between
            evicted.add(action)
            turn, num_evicted[action.stage] = num_evicted[action.stage], num_evicted[action.stage] + 1
            backward = backward_of[action.stage, action.microbatch]
            own = int(rounds[forward_of[backward]]), int(rounds[backward])
            evict_rounds, load_rounds = _windows(*own, forwards, backwards, is_open[:, device])
            if not len(evict_rounds) or not len(load_rounds):
                continue  # the time is too short to leave and come back
            # `fraction` pages of each microbatch on average: whole numbers, from the running sum rounded down.
            fraction = schedule.parked_of(action.stage) * layers_per_stage[action.stage]
            for layer in range(floor((turn + 1) * fraction) - floor(turn * fraction)):
                evict, load = evict_rounds[layer % len(evict_rounds)], load_rounds[-1 - layer % len(load_rounds)]
                pages.append((backward, layer, evict, load, device, partner))
    return ParkedPages(*np.array(pages, dtype=int).reshape(-1, 6).T)


def _keys(columns: Columns, chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) of the chosen actions."""
    return zip(columns.stage[chosen].tolist(), columns.microbatch[chosen].tolist(), strict=True)


def _windows(
    forward: int, backward: int, forwards: np.ndarray, backwards: np.ndarray, is_open: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rounds in which the pages of one microbatch may leave, and those in which they may return.

    Args:
        forward, backward: rounds of the microbatch's own F and backward.
        forwards, backwards: sorted rounds of all F and all backwards on its device.
        is_open: [R] whether the device and its partner may exchange pages.

    Example:
        F in rounds 0, 4, 8 and backwards in 7, 11, 15. The pages of microbatch 1, whose F is in round 4 and whose
        backward in 11, leave in rounds 5 to 8, before or during the next F, and return in 7 to 10. The windows
        overlap, so each gets half of the rounds in between.

        >>> windows = _windows(4, 11, np.array([0, 4, 8]), np.array([7, 11, 15]), np.ones(16, bool))
        >>> [window.tolist() for window in windows]
        [[5, 6, 7], [8, 9, 10]]
    """
    between = forward + 1 + np.flatnonzero(is_open[forward + 1 : backward])
    evict_rounds = between[between <= _following(forwards, forward)]
    load_rounds = between[between >= -_following(-backwards[::-1], -backward)]
    if not len(evict_rounds) or not len(load_rounds) or evict_rounds[-1] >= load_rounds[0]:
        evict_rounds, load_rounds = np.array_split(between, 2)
    return evict_rounds, load_rounds


def _following(rounds: np.ndarray, own: int) -> int:
    """The round after `own` in sorted `rounds`; after the last one, extrapolated by the distance to the one before."""
    i = int(np.searchsorted(rounds, own))
    if i + 1 < len(rounds):
        return int(rounds[i + 1])
    return 2 * own - int(rounds[i - 1]) if i else own + len(rounds)
