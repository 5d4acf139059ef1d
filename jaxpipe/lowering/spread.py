"""What travels once a step for a chunk, in pieces: one behind each of several actions of its device.

A collective over `data` takes longer than the layer in front of it where a layer computes for few tokens. Between the
first F of two chunks a device has F of other chunks; so each of them gathers a piece of every layer of the chunk that
comes. Sums are the mirror image: what a B or W has completed is summed in pieces behind it and the ones that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.table import RoundTable

# Pieces of a layer. Smaller ones would wait for the latency of their collective.
NUMBERS = (2, 4, 8)


class Spread(NamedTuple):
    """The actions that take pieces.

    Example:
        A device computes with its chunk 0 four times, then with chunk 1. The first F of chunk 1 and three before it
        take a piece each of chunk 1.

        >>> rounds, chunks = np.array([2, 3, 4, 5, 6, 7]), np.array([0, 0, 0, 0, 1, 1])
        >>> _windows(rounds.tolist(), [2, 6])
        [[3, 4, 5, 6]]
    """

    num_pieces: int  # of a layer; 1: nothing is spread
    rounds: tuple[dict[int, list[int]], ...]  # [D] chunk -> rounds of its actions, in which its pieces travel


def spread(table: RoundTable, actions: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> Spread:
    """Spreads what belongs to all chunks of a device but its first one.

    Args:
        actions: [D] the rounds of actions that can take pieces.
        ends: [D] of these the last ones that can take those of a chunk: of the chunk that is their own.
    """
    layers = np.array(table.layers_per_stage)[table.stage]
    windows = [
        (device, window)
        for device in range(table.schedule.num_devices)
        for window in _windows(list(actions[device]), list(ends[device]))
    ]

    def taken(num: int) -> list[tuple[int, list[int]]]:
        last = [(device, window[-num:]) for device, window in windows if len(window) >= num]
        # A turn of an action for each layer of the chunk, whose own action is the last.
        return [(d, rounds) for d, rounds in last if (layers[rounds, d] >= layers[rounds[-1], d]).all()]

    # Of each chunk that is spread one piece in `num` stays behind the action that has taken all.
    num_pieces = max(NUMBERS, key=lambda num: len(taken(num)) * (1 - 1 / num))
    of_devices: tuple[dict[int, list[int]], ...] = tuple({} for _ in range(table.schedule.num_devices))
    for device, rounds in taken(num_pieces):
        of_devices[device][int(table.chunk[rounds[-1], device])] = rounds
    return Spread(num_pieces if any(of_devices) else 1, of_devices)


def _windows(rounds: list[int], ends: list[int]) -> list[list[int]]:
    """For all of `ends` but the first the rounds behind the end before, up to it."""
    places = [rounds.index(end) for end in ends]
    return [rounds[before + 1 : place + 1] for before, place in pairwise(places)]
