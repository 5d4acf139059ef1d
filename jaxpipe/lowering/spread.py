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
from jaxpipe.schedules.schedule import Kind, Schedule

# Pieces of a layer. Smaller ones would wait for the latency of their collective.
NUMBERS = (2, 4, 8)
SUMMING_KINDS = (Kind.B, Kind.W)  # their layers make gradients of matrices; see `jaxpipe.program.shapes` for I


class Spread(NamedTuple):
    """The actions that take pieces."""

    num_pieces: int  # of a layer; 1: nothing is spread
    places: tuple[dict[int, list[int]], ...]  # [D] stage -> places of its actions in the order of the device


class Order(NamedTuple):
    """What a device does, in order: its actions with layers, of one replica."""

    stage: np.ndarray
    place: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """Places of the first action of each stage, in order."""
        _, first = np.unique(self.stage, return_index=True)
        return self.place[np.sort(first)]


def order_of(kind: np.ndarray, stage: np.ndarray, layers: Sequence[int], *kinds: Kind) -> Order:
    """The actions of `kinds` with layers, of all that a device does."""
    place = np.flatnonzero(np.isin(kind, kinds) & (np.array(layers)[stage] > 0))
    return Order(stage[place], place)


def spread_gathers(forwards: Sequence[Order], layers: Sequence[int]) -> Spread:
    """Gathers of all chunks but the first one of a device, in pieces behind F; the chunk's own is the last of them.

    Args:
        forwards: [D] F of each device.
        layers: [S].

    Example:
        A device computes with stage 0 four times, then with stage 4. The first F of stage 4 and three before it gather
        stage 4.

        >>> forwards = Order(stage=np.array([0, 0, 0, 0, 4, 4]), place=np.arange(6))
        >>> spread_gathers([forwards], layers=[2] * 8)
        Spread(num_pieces=4, places=({4: [1, 2, 3, 4]},))
    """
    windows: list[tuple[int, int, list[int]]] = []
    stages = [dict(zip(order.place.tolist(), order.stage.tolist(), strict=True)) for order in forwards]
    for device, order in enumerate(forwards):
        for before, end in pairwise(order.first.tolist()):
            between = order.place[(order.place > before) & (order.place <= end)].tolist()
            windows.append((device, stages[device][end], between))

    def taken(num: int) -> list[tuple[int, int, list[int]]]:
        last = [(device, stage, window[-num:]) for device, stage, window in windows if len(window) >= num]
        # A turn of an action for each layer of the stage.
        return [
            (device, stage, window)
            for device, stage, window in last
            if min(layers[stages[device][place]] for place in window) >= layers[stage]
        ]

    # Of each stage that is spread one piece in `num` stays behind the action that has taken all.
    num_pieces = max(NUMBERS, key=lambda num: len(taken(num)) * (1 - 1 / num))
    places: tuple[dict[int, list[int]], ...] = tuple({} for _ in forwards)
    for device, stage, window in taken(num_pieces):
        places[device][stage] = window
    return Spread(num_pieces if any(places) else 1, places)


def spread_sums(summing: Sequence[Order], layers: Sequence[int]) -> Spread:
    """Sums of all chunks but the last one of a device, in pieces behind B or W; the one that completes it is the first.

    Args:
        summing: [D] `SUMMING_KINDS` of each device.
        layers: [S].
    """
    # From the end to the beginning sums are gathers: the action that completes a chunk is its first one.
    backwards = [Order(order.stage[::-1], -order.place[::-1]) for order in summing]
    num_pieces, places = spread_gathers(backwards, layers)
    in_time = ({stage: [-place for place in window[::-1]] for stage, window in of.items()} for of in places)
    return Spread(num_pieces, tuple(in_time))


def orders_in_rounds(table: RoundTable, *kinds: Kind) -> list[Order]:
    """[D] the actions of `kinds` in the rounds of a table; places are rounds."""
    devices = zip(table.kind.T, table.stage.T, strict=True)
    return [order_of(kind, stage, table.layers_per_stage, *kinds) for kind, stage in devices]


def orders_of(schedule: Schedule, layers: Sequence[int], *kinds: Kind) -> list[Order]:
    """[D] the actions of `kinds` in the rows of a schedule."""
    columns = schedule.columns
    rows = [slice(*ends) for ends in pairwise(columns.first.tolist())]
    return [order_of(columns.kind[row], columns.stage[row], layers, *kinds) for row in rows]
