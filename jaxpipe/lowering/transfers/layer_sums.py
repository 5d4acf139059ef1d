"""Sums over `data` behind layers: the gradients of a chunk, behind the layers of the action that completes them.

The sum of a layer travels while the next layer of that action computes, that of its last layer while the device's next
such action begins. Where enough B or W of other chunks follow before one completes the next chunk, these sum the layers
with it, a piece each (`jaxpipe.lowering.spread`). Not behind the last B of a device that sends a message: the stage
before would wait for what is longer than the layer. What is left then a round sums (`sums_over_data`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.cells import IDLE
from jaxpipe.lowering.spread import SUMMING_KINDS, Spread, orders_in_rounds, spread_sums
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.schedules.schedule import Kind


class Summed(NamedTuple):
    """A chunk that is summed behind layers."""

    stage: int
    chunk: int
    rounds: list[int]  # of the actions behind whose layers its layers are summed; it is complete in the first
    before: int  # the chunk before, whose first layer their first turns sum; IDLE if none has been left


@dataclass(frozen=True, eq=False)
class SumGrids:
    """The layers that an action sums: each turn the one before its own of a chunk, backwards from the last one."""

    chunk: np.ndarray  # [R, D]
    num_layers: np.ndarray  # [R, D] of that chunk
    before: np.ndarray  # [R, D] the chunk whose first layer the first turn sums; IDLE for none
    piece: np.ndarray  # [R, D] which piece of each layer


class LayerSums(Transfer[RoundTable]):
    """Sums of whole layers, behind the layers of the action that completes their chunk."""

    name = "layer_sums"

    @property
    def num_pieces(self) -> int:
        """Of a layer."""
        return 1

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On actions that complete a chunk, but for those of pieces, and a device's last one if its message waits."""
        hangs = np.zeros(table.kind.shape, bool)
        for device, chunks in enumerate(summed_behind_layers(table)):
            for summed in chunks:
                hangs[summed.rounds, device] = self._has(table, device, summed.stage)
        return hangs

    def grids(self, table: RoundTable) -> SumGrids:
        """What each action sums."""
        layers = np.array(table.layers_per_stage)[table.stage]
        chunk = table.chunk.copy()
        num_layers = layers.copy()
        before = np.full_like(chunk, IDLE)
        piece = np.zeros_like(chunk)
        for device, chunks in enumerate(summed_behind_layers(table)):
            for summed in chunks:
                rounds = summed.rounds
                chunk[rounds, device] = summed.chunk
                num_layers[rounds, device] = layers[rounds[0], device]  # the action that completes it is the first
                before[rounds, device] = summed.before
                piece[rounds, device] = range(len(rounds))
        return SumGrids(chunk, num_layers, before, piece)

    def _has(self, table: RoundTable, device: int, stage: int) -> bool:
        """Whether it sums the stage."""
        pieces = table.transfers.get(SumPieces.name)
        return not (isinstance(pieces, SumPieces) and stage in pieces.spread.places[device])


@dataclass(frozen=True, eq=False)
class SumPieces(LayerSums):
    """Sums of pieces of layers, behind layers of their own chunk and of others."""

    spread: Spread

    name = "sum_pieces"

    @classmethod
    def of(cls, table: RoundTable) -> SumPieces:
        """Those of all chunks that have enough B or W behind them."""
        return cls(spread_sums(orders_in_rounds(table, *SUMMING_KINDS), table.layers_per_stage))

    @property
    def num_pieces(self) -> int:
        """Of a layer."""
        return self.spread.num_pieces

    def _has(self, table: RoundTable, device: int, stage: int) -> bool:
        return stage in self.spread.places[device]


def summed_behind_layers(table: RoundTable) -> list[list[Summed]]:
    """[D] the chunks that each device sums behind layers, in order."""
    pieces = table.transfers.get(SumPieces.name)
    # With two replicas gradients travel to the other holder from the second round on: no layer is left for later.
    waits = table.schedule.num_replicas == 1
    of_devices = []
    for device, completing in enumerate(_completing(table)):
        in_pieces = pieces.spread.places[device] if isinstance(pieces, SumPieces) else {}
        chunks: list[Summed] = []
        for round_ in completing:
            sends = table.kind[round_, device] == Kind.B and table.stage[round_, device] > 0
            if sends and round_ == completing[-1]:
                continue
            stage = int(table.stage[round_, device])
            before = chunks[-1].chunk if chunks and waits else IDLE
            chunks.append(Summed(stage, int(table.chunk[round_, device]), in_pieces.get(stage, [round_]), before))
        of_devices.append(chunks)
    return of_devices


def _completing(table: RoundTable) -> list[list[int]]:
    """[D] the rounds of the actions that complete a chunk with layers."""
    has_layers = np.array(table.layers_per_stage)[table.stage] > 0
    return [np.flatnonzero(column).tolist() for column in ((table.completes == 1) & has_layers).T]


LAYER_SUMS = LayerSums()
