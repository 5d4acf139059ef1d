"""Gathers of weights over `data` by devices that keep their part of compute copies alone: in every action.

An action gathers all of its layers, one ahead: its last layer gathers the first one of the next action.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.schedules.schedule import Kind

# Kinds whose layers read their weights. W reads none that travel: see `jaxpipe.program.shapes`.
GATHERING_KINDS = (Kind.F, Kind.B, Kind.I)


@dataclass(frozen=True, eq=False)
class GatherGrids:
    """The layer that the last turn of an action gathers; behind the last such action of a device one of its own."""

    next_chunk: np.ndarray  # [R, D]
    next_layer: np.ndarray  # [R, D]


class WeightGathers(Transfer[RoundTable]):
    """What devices of one index of `pipe` gather; nothing of it travels along `pipe`."""

    name = "weight_gathers"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On all actions that read weights; on those without layers, too: else these would be traced once more."""
        return np.isin(table.kind, GATHERING_KINDS)

    def first_chunk(self, table: RoundTable) -> np.ndarray:
        """[D] the chunk whose first layer precedes all actions."""
        rounds = self._rounds(table)
        return np.array([table.chunk[rounds[d][0], d] if rounds[d] else 0 for d in range(len(rounds))], np.int32)

    def grids(self, table: RoundTable) -> GatherGrids:
        """The layers that follow."""
        next_chunk = table.chunk.copy()
        next_layer = np.zeros_like(next_chunk)
        # A backward begins with the last layer of its stage.
        begins_with = np.where(table.kind == Kind.F, 0, np.array(table.layers_per_stage)[table.stage] - 1)
        for device, rounds in enumerate(self._rounds(table)):
            next_chunk[rounds[:-1], device] = table.chunk[rounds[1:], device]
            next_layer[rounds[:-1], device] = begins_with[rounds[1:], device]
        return GatherGrids(next_chunk, next_layer)

    def _rounds(self, table: RoundTable) -> list[list[int]]:
        """[D] the rounds of the actions with layers that gather, in order."""
        gathers = self.hangs(table) & (np.array(table.layers_per_stage)[table.stage] > 0)
        return [np.flatnonzero(column).tolist() for column in gathers.T]


WEIGHT_GATHERS = WeightGathers()
