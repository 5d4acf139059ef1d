"""Gathers of weights over `data`: a layer's compute copy, behind the layer before it in the first F of its chunk.

The first layer of a chunk travels behind the last layer of the chunk before, so that of a device's gathers one alone
stands before its first action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True, eq=False)
class GatherGrids:
    """The chunk whose first layer the last turn of an action gathers."""

    next_chunk: np.ndarray  # [R, D] behind the last of a device its own chunk, once more


class WeightGathers(Transfer[RoundTable]):
    """What devices of one index of `pipe` gather; nothing of it travels along `pipe`."""

    name = "weight_gathers"

    def payloads(self, table: RoundTable) -> Payloads:
        """None along `pipe`."""
        none = np.zeros(0, int)
        return Payloads(none, none, none, none, size=1)

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On the first F of each chunk."""
        hangs = np.zeros(table.kind.shape, bool)
        for device, firsts in enumerate(self._first_rounds(table)):
            hangs[firsts, device] = True
        return hangs

    def first_chunk(self, table: RoundTable) -> np.ndarray:
        """[D] the chunk of a device's first F, whose first layer is gathered before any action."""
        return np.array(
            [table.chunk[firsts[0], device] if firsts else 0 for device, firsts in enumerate(self._first_rounds(table))]
        )

    def grids(self, table: RoundTable) -> GatherGrids:
        """The chunks that follow."""
        next_chunk = table.chunk.copy()
        for device, firsts in enumerate(self._first_rounds(table)):
            next_chunk[firsts[:-1], device] = table.chunk[firsts[1:], device]
        return GatherGrids(next_chunk)

    def _first_rounds(self, table: RoundTable) -> list[list[int]]:
        """[D] the rounds of the first F of each of a device's chunks that have layers, in order."""
        has_layers = np.array(table.layers_per_stage)[table.stage] > 0
        first_rounds = []
        for device in range(table.schedule.num_devices):
            rounds = np.flatnonzero((table.kind[:, device] == Kind.F) & has_layers[:, device])
            _, first = np.unique(table.chunk[rounds, device], return_index=True)
            first_rounds.append(np.sort(rounds[first]).tolist())
        return first_rounds


WEIGHT_GATHERS = WeightGathers()
