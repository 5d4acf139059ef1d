"""Gathers of weights over `data`: a layer's compute copy, behind the layer before it.

A device that keeps its compute copies gathers each once a step, in the first F of its chunk. The first layer of a chunk
travels behind the last layer that the device has gathered before. A device whose first F waits for a message gathers
that chunk before any action, while the pipeline fills; one that begins at once, its first layer alone.

A device that keeps its part of them alone gathers all layers of an action in that action, one ahead: the last layer of
an action gathers the first one of the next.
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


@dataclass(frozen=True, eq=False)
class GatheredBefore:
    """What each device gathers before any action: all layers of a chunk or none, and the first one of the next."""

    chunk: np.ndarray  # [D]
    num_layers: np.ndarray  # [D] all of the chunk, or 0
    next_chunk: np.ndarray  # [D]
    num_turns: np.ndarray  # [D] layers in all: one more than `num_layers` if there is a next chunk


@dataclass(frozen=True)
class WeightGathers(Transfer[RoundTable]):
    """What devices of one index of `pipe` gather; nothing of it travels along `pipe`."""

    by_action: bool = False  # whether every action gathers its layers, else the first F of each chunk

    name = "weight_gathers"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On all actions that read weights, or the first F of each chunk that is not gathered before any action."""
        hangs = np.zeros(table.kind.shape, bool)
        for device, rounds in enumerate(self._rounds(table)):
            hangs[rounds[self._num_before(table, device, rounds) :], device] = True
        # Without layers, too: else these would be traced once more.
        return np.isin(table.kind, GATHERING_KINDS) if self.by_action else hangs

    def before(self, table: RoundTable) -> GatheredBefore:
        """What precedes the actions."""
        layers = np.array(table.layers_per_stage)
        chunk, num_layers, next_chunk, num_turns = np.zeros((4, table.schedule.num_devices), np.int32)
        for device, rounds in enumerate(self._rounds(table)):
            num_before = self._num_before(table, device, rounds)
            for round_ in rounds[:num_before]:
                chunk[device] = table.chunk[round_, device]
                num_layers[device] = num_turns[device] = layers[table.stage[round_, device]]
            for round_ in rounds[num_before : num_before + 1]:
                next_chunk[device] = table.chunk[round_, device]
                num_turns[device] += 1
        return GatheredBefore(chunk, num_layers, next_chunk, num_turns)

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

    def _num_before(self, table: RoundTable, device: int, rounds: list[int]) -> int:
        """Chunks that a device gathers before any action, of those whose first F are in `rounds`: 0 or 1."""
        return int(not self.by_action and bool(rounds) and table.stage[rounds[0], device] > 0)

    def _rounds(self, table: RoundTable) -> list[list[int]]:
        """[D] the rounds of the actions that gather, in order: the first F of each chunk, or all; those with layers."""
        has_layers = np.array(table.layers_per_stage)[table.stage] > 0
        kinds = GATHERING_KINDS if self.by_action else (Kind.F,)
        of_devices = []
        for device in range(table.schedule.num_devices):
            rounds = np.flatnonzero(np.isin(table.kind[:, device], kinds) & has_layers[:, device])
            if not self.by_action:
                _, first = np.unique(table.chunk[rounds, device], return_index=True)
                rounds = np.sort(rounds[first])
            of_devices.append(rounds.tolist())
        return of_devices


WEIGHT_GATHERS = WeightGathers()
GATHERS_BY_ACTION = WeightGathers(by_action=True)
