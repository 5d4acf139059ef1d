"""One-way transfers between the two devices of a pair, apart from messages: of pages, of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Moves:
    """M transfers.

    Attributes:
        round: [M] in which it travels.
        source, target: [M] devices.
        lane: [M] its place among what its source sends in that round.
    """

    round: np.ndarray
    source: np.ndarray
    target: np.ndarray
    lane: np.ndarray


def in_lanes(rounds: np.ndarray, source: np.ndarray, target: np.ndarray) -> Moves:
    """Moves with lanes counted in the order given.

    Example:
        >>> in_lanes(np.array([3, 3, 4]), np.array([0, 0, 0]), np.array([1, 1, 1])).lane.tolist()
        [0, 1, 0]
    """
    order = np.lexsort((source, rounds))
    key = np.stack([rounds[order], source[order]], axis=1)
    is_first = np.append(True, (np.diff(key, axis=0) != 0).any(axis=1))[: len(order)]
    rank = np.arange(len(order))
    lane = np.empty(len(order), dtype=int)
    lane[order] = rank - np.maximum.accumulate(np.where(is_first, rank, 0))
    return Moves(rounds, source, target, lane)
