"""Gathers of weights over `data`: a layer's compute copy, behind the layer before it in the first F of its chunk.

The first layer of a chunk travels behind the last layer that the device has gathered before. A device whose first F
waits for a message gathers that chunk before any action, while the pipeline fills; one that begins at once, its first
layer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True, eq=False)
class GatherGrids:
    """The chunk whose first layer the last turn of an action gathers."""

    next_chunk: np.ndarray  # [R, D] behind the last of a device its own chunk, once more


@dataclass(frozen=True, eq=False)
class GatheredBefore:
    """What each device gathers before any action: all layers of a chunk or none, and one of the next one."""

    chunk: np.ndarray  # [D]
    num_layers: np.ndarray  # [D] all of the chunk, or 0
    next_chunk: np.ndarray  # [D]
    num_turns: np.ndarray  # [D] layers in all: one more than `num_layers` if there is a next chunk


class WeightGathers(Transfer[RoundTable]):
    """What devices of one index of `pipe` gather; nothing of it travels along `pipe`."""

    name = "weight_gathers"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On the first F of each chunk, but for a device's first one if it waits for a message."""
        hangs = np.zeros(table.kind.shape, bool)
        for device, rounds in enumerate(self._first_rounds(table)):
            hangs[rounds[self._num_before(table, device, rounds) :], device] = True
        return hangs

    def before(self, table: RoundTable) -> GatheredBefore:
        """What precedes the actions."""
        layers = np.array(table.layers_per_stage)
        chunk, num_layers, next_chunk, num_turns = np.zeros((4, table.schedule.num_devices), np.int32)
        for device, rounds in enumerate(self._first_rounds(table)):
            num_before = self._num_before(table, device, rounds)
            for round_ in rounds[:num_before]:
                chunk[device] = table.chunk[round_, device]
                num_layers[device] = num_turns[device] = layers[table.stage[round_, device]]
            for round_ in rounds[num_before : num_before + 1]:
                next_chunk[device] = table.chunk[round_, device]
                num_turns[device] += 1
        return GatheredBefore(chunk, num_layers, next_chunk, num_turns)

    def grids(self, table: RoundTable) -> GatherGrids:
        """The chunks that follow."""
        next_chunk = table.chunk.copy()
        for device, rounds in enumerate(self._first_rounds(table)):
            next_chunk[rounds[:-1], device] = table.chunk[rounds[1:], device]
        return GatherGrids(next_chunk)

    def _num_before(self, table: RoundTable, device: int, rounds: list[int]) -> int:
        """Chunks that a device gathers before any action, of those whose first F are in `rounds`: 0 or 1."""
        return int(bool(rounds) and table.stage[rounds[0], device] > 0)

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
