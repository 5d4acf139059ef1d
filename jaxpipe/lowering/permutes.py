"""The permutes of a round, and the transfers that they carry.

A permute (`lax.ppermute`, HLO `collective-permute`) takes (source, target) pairs, in which every device is source at
most once and target at most once. Permutes belong to types of rounds: every round of a type runs the same permutes,
with the pairs that any of them needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Pair = tuple[int, int]  # (source, target) devices
Permutes = tuple[tuple[tuple[Pair, ...], ...], ...]  # [type of round][permute] -> pairs


def permutes_of(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """The permutes that carry all `pairs`: in each, a device is source at most once and target at most once.

    Pairs are grouped by direction and distance, so that messages of one kind travel together and couple only
    neighbours; other pairs join permutes that have room.

    Example:
        >>> permutes_of({(0, 1), (1, 2), (2, 1), (1, 0)})
        (((1, 0), (2, 1)), ((0, 1), (1, 2)))
    """
    permutes: list[list[Pair]] = []
    # Sorted: a set has no order, and every process must get the same permutes.
    for source, target in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
        for permute in permutes:
            if all(source != s and target != t for s, t in permute):
                permute.append((source, target))
                break
        else:
            permutes.append([(source, target)])
    return tuple(tuple(sorted(permute)) for permute in permutes)


@dataclass(frozen=True, eq=False)
class Sends:
    """M one-way transfers, each of one page or of one layer's gradients."""

    round: np.ndarray  # [M] the round whose permute carries the transfer
    source: np.ndarray  # [M] device
    target: np.ndarray  # [M] device
    lane: np.ndarray  # [M] index of the transfer among those of its source in that round; each lane has a permute

    def permutes(self, round_type: np.ndarray, num_types: int) -> Permutes:
        """The permutes that carry these transfers, [type][lane] -> pairs: the union over all rounds of the type."""
        keys = np.stack([round_type[self.round], self.lane, self.source, self.target], axis=1)
        permutes: list[list[list[Pair]]] = [[] for _ in range(num_types)]
        for index, lane, source, target in np.unique(keys, axis=0).tolist():
            if lane == len(permutes[index]):  # keys are sorted, and the lanes of a source have no gaps
                permutes[index].append([])
            permutes[index][lane].append((source, target))
        return tuple(tuple(map(tuple, lanes)) for lanes in permutes)


def lane_grids(
    sends: Sends, sent: np.ndarray, received: np.ndarray, *, num_rounds: int, num_devices: int, num_lanes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What each device reads into its lanes, and stores from them, at the end of each round: `sent` and `received`.

    Returns:
        [R, D, lane, ...] of sources, [R, D] lanes that are used; the same of targets.
    """
    shape = (num_rounds, num_devices)
    grids = []
    # A payload is read at the end of the round before it travels, and stored at the end of its own.
    for rounds, device, values in ((sends.round - 1, sends.source, sent), (sends.round, sends.target, received)):
        of_lane = np.zeros((*shape, num_lanes, *values.shape[1:]), np.int32)
        of_lane[rounds, device, sends.lane] = values
        num_used = np.zeros(shape, np.int32)
        np.add.at(num_used, (rounds, device), 1)
        grids += [of_lane, num_used]
    read, num_sends, stored, num_recvs = grids
    return read, num_sends, stored, num_recvs


def in_lanes(rounds: np.ndarray, source: np.ndarray, target: np.ndarray) -> Sends:
    """The transfers with their lanes, numbered in the given order.

    Example:
        >>> in_lanes(np.array([3, 3, 4]), np.array([0, 0, 0]), np.array([1, 1, 1])).lane.tolist()
        [0, 1, 0]
    """
    return Sends(rounds, source, target, number_of_equals(rounds, source))


def number_of_equals(*keys: np.ndarray) -> np.ndarray:
    """[M] index of each entry among those of equal `keys`, each [M], in the given order.

    Example:
        >>> number_of_equals(np.array([3, 4, 3])).tolist()
        [0, 0, 1]
    """
    order = np.lexsort(keys)
    changes = [np.diff(key[order]) != 0 for key in keys]
    # Cut to the length, for no entries at all.
    is_first = np.append(True, np.logical_or.reduce(changes))[: len(order)]
    rank = np.arange(len(order))
    number = np.empty(len(order), dtype=int)
    number[order] = rank - np.maximum.accumulate(np.where(is_first, rank, 0))
    return number
