"""In which rounds do the pages of a balanced schedule leave for the paired device, and come back?

EVICT and LOAD change nothing in the rounds of the actions. Pages leave between their F and the next F of their
device, and come back between the backward before their own and their own, a part in each round of that time in which
the two devices may meet (`meeting_rounds`). A page is read at the end of the round before, travels, and is stored at
the end of its round. Departures come as early, returns as late as they can, so that what one microbatch leaves behind
makes room for the next.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import floor

import numpy as np

from jaxpipe.lowering.moves import Moves, in_lanes
from jaxpipe.lowering.rounds import REMOTE_ROUNDS
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Action, Columns, Kind, Schedule


@dataclass(frozen=True, eq=False)
class Parked:
    """Pages that spend a part of their life on the paired device; T of them.

    Attributes:
        backward: [T] index of the B or I that reads the page, in the columns of `without_transfers`.
        layer: [T] of the stage.
        leaves: [T] the round in which it travels to the partner.
        returns: [T] the round in which it travels back; later than `leaves`.
        home, partner: [T] devices.
    """

    backward: np.ndarray
    layer: np.ndarray
    leaves: np.ndarray
    returns: np.ndarray
    home: np.ndarray
    partner: np.ndarray

    @cached_property
    def moves(self) -> Moves:
        """All departures and returns."""
        rounds = np.concatenate([self.leaves, self.returns])
        source = np.concatenate([self.home, self.partner])
        return in_lanes(rounds, source, np.concatenate([self.partner, self.home]))


NOTHING_PARKED = Parked(*np.zeros((6, 0), dtype=int))


def without_transfers(schedule: Schedule) -> Schedule:
    """`schedule` with its compute actions alone; itself where it has no others."""
    if schedule.columns.is_kind(*COMPUTE_KINDS).all():
        return schedule
    rows = tuple(tuple(action for action in row if action.kind in COMPUTE_KINDS) for row in schedule.rows)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, rows)


def meeting_rounds(steps: Schedule, rounds: np.ndarray, position: np.ndarray, lengths: np.ndarray | None) -> np.ndarray:
    """[R, D] whether a device and its partner exchange pages in a round.

    They do where any device computes at that position of the body: a transfer hides behind an action. And, if rounds
    keep step with time, where neither waits for the other: who has come to the end of a round must not find that
    its partner reaches the beginning of it only after its own next action should have begun.

    Args:
        steps: compute actions alone.
        rounds: [A] of its actions.
        position: [R] of the rounds in the body.
        lengths: [kinds] of actions, as in `periodic_rounds`; None if rounds do not keep step with time.
    """
    num_rounds, num_devices, columns = len(position), steps.num_devices, steps.columns
    is_busy = np.isin(position, position[rounds])[:, None]
    if lengths is None:
        return np.repeat(is_busy, num_devices, axis=1)
    # In rounds as units of time an action ends two after the one that it stands in.
    done, begins = np.full((num_rounds + 1, num_devices), -np.inf), np.full((num_rounds + 1, num_devices), np.inf)
    done[rounds + 1, columns.device] = rounds + 2
    begins[rounds, columns.device] = rounds + 2 - REMOTE_ROUNDS * lengths[columns.kind]
    reached = np.maximum.accumulate(done)[:-1]  # when a device is at the beginning of the round
    leaves = np.minimum.accumulate(begins[::-1])[::-1][1:]  # when it must be at its end
    partner = [steps.placement.partner_of(device) for device in range(num_devices)]
    is_open = leaves >= reached[:, partner]
    is_open &= is_open[:, partner]
    for p in np.unique(position):
        is_open[position == p] = is_open[position == p].all(axis=0)
    is_open &= is_busy
    return np.where(is_open.any(axis=0), is_open, is_busy)


def park(
    schedule: Schedule, steps: Schedule, layers_per_stage: tuple[int, ...], rounds: np.ndarray, meets: np.ndarray
) -> Parked:
    """When the parked pages of `schedule` travel.

    Args:
        schedule: with EVICT and LOAD actions.
        steps: the same without them.
        rounds: [A] of the actions of `steps`.
        meets: [R, D], see `meeting_rounds`.
    """
    columns, forward_of = steps.columns, dependencies(steps).local
    is_f, is_b = columns.is_kind(Kind.F), columns.is_kind(Kind.B, Kind.I)
    backward_of = dict(zip(_keys(columns, is_b), np.flatnonzero(is_b).tolist(), strict=True))
    pages = []
    for device, row in enumerate(schedule.rows):
        here, partner = columns.device == device, steps.placement.partner_of(device)
        forwards, backwards = np.sort(rounds[here & is_f]), np.sort(rounds[here & is_b])
        num_evicted: dict[int, int] = defaultdict(int)
        evicted: set[Action] = set()
        for action in row:
            if action.kind is not Kind.EVICT or action in evicted:
                continue  # what leaves twice is away all the time in between
            evicted.add(action)
            turn, num_evicted[action.stage] = num_evicted[action.stage], num_evicted[action.stage] + 1
            backward = backward_of[action.stage, action.microbatch]
            own = int(rounds[forward_of[backward]]), int(rounds[backward])
            leaves, returns = _windows(*own, forwards, backwards, meets[:, device])
            if not len(leaves) or not len(returns):
                continue  # there is no time to leave and come back
            share = schedule.parked_of(action.stage) * layers_per_stage[action.stage]
            for layer in range(floor((turn + 1) * share) - floor(turn * share)):
                out, back = leaves[layer % len(leaves)], returns[-1 - layer % len(returns)]
                pages.append((backward, layer, out, back, device, partner))
    return Parked(*np.array(pages, dtype=int).reshape(-1, 6).T)


def _keys(columns: Columns, chosen: np.ndarray) -> Iterator[tuple[int, int]]:
    """(stage, microbatch) of the chosen actions."""
    return zip(columns.stage[chosen].tolist(), columns.microbatch[chosen].tolist(), strict=True)


def _windows(
    forward: int, backward: int, forwards: np.ndarray, backwards: np.ndarray, meets: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds in which the pages of one microbatch may leave, and those in which they may come back.

    Args:
        forward, backward: rounds of its own F and backward.
        forwards, backwards: sorted rounds of all of them on its device.
        meets: [R] whether the device and its partner may exchange pages.
    """
    between = forward + 1 + np.flatnonzero(meets[forward + 1 : backward])
    leaves = between[between <= _following(forwards, forward)]
    returns = between[between >= -_following(-backwards[::-1], -backward)]
    if not len(leaves) or not len(returns) or leaves[-1] >= returns[0]:
        leaves, returns = np.array_split(between, 2)
    return leaves, returns


def _following(rounds: np.ndarray, own: int) -> int:
    """The round after `own` in sorted `rounds`; after the last one, one as far away as the one before."""
    i = int(np.searchsorted(rounds, own))
    if i + 1 < len(rounds):
        return int(rounds[i + 1])
    return 2 * own - int(rounds[i - 1]) if i else own + len(rounds)
