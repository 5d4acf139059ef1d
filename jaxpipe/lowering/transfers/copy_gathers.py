"""Gathers of compute copies over `data` by devices that keep them: once a step, behind forwards.

The first F of a chunk gathers its layers, one ahead; its last layer gathers the first one of the next chunk. Where
enough F of other chunks stand before it, these gather the layers with it, a piece each (`jaxpipe.lowering.spread`). A
device whose first F waits for a message gathers that chunk before any action, while the pipeline fills; one that begins
at once, its first layer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.spread import Spread, spread
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True, eq=False)
class CopyGrids:
    """The layers that an action gathers: each turn the one after its own of a chunk, from the second on.

    Behind the last layer of the chunk its turns gather the first one of the next chunk.
    """

    chunk: np.ndarray  # [R, D]
    num_layers: np.ndarray  # [R, D] of that chunk
    next_chunk: np.ndarray  # [R, D] for the last chunk of a device itself
    piece: np.ndarray  # [R, D] which piece of each layer


@dataclass(frozen=True, eq=False)
class GatheredBefore:
    """What each device gathers before any action: all layers of a chunk or none, and the first one of the next."""

    chunk: np.ndarray  # [D]
    num_layers: np.ndarray  # [D] all of the chunk, or 0
    next_chunk: np.ndarray  # [D]
    num_turns: np.ndarray  # [D] layers in all: one more than `num_layers` if there is a next chunk


class CopyGathers(Transfer[RoundTable]):
    """Gathers of whole layers, behind the layers of their own chunk."""

    name = "copy_gathers"

    @property
    def num_pieces(self) -> int:
        """Of a layer."""
        return 1

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On the first F of each chunk that is gathered neither before any action nor in pieces."""
        hangs = np.zeros(table.kind.shape, bool)
        for device, chunks in enumerate(self._rounds(table)):
            hangs[[round_ for rounds in chunks.values() for round_ in rounds], device] = True
        return hangs

    def before(self, table: RoundTable) -> GatheredBefore:
        """What precedes the actions."""
        layers = np.array(table.layers_per_stage)
        chunk, num_layers, next_chunk, num_turns = np.zeros((4, table.schedule.num_devices), np.int32)
        for device, rounds in enumerate(first_forwards(table)):
            num_before = _num_before(table, device, rounds)
            for round_ in rounds[:num_before]:
                chunk[device] = table.chunk[round_, device]
                num_layers[device] = num_turns[device] = layers[table.stage[round_, device]]
            for round_ in rounds[num_before : num_before + 1]:
                next_chunk[device] = table.chunk[round_, device]
                num_turns[device] += 1
        return GatheredBefore(chunk, num_layers, next_chunk, num_turns)

    def grids(self, table: RoundTable) -> CopyGrids:
        """What each action gathers."""
        layers = np.array(table.layers_per_stage)[table.stage]
        chunk, next_chunk = table.chunk.copy(), table.chunk.copy()
        num_layers, piece = layers.copy(), np.zeros_like(chunk)
        of_devices = zip(first_forwards(table), self._rounds(table), strict=True)
        for device, (first, chunks) in enumerate(of_devices):
            order = table.chunk[first, device].tolist()
            following = dict(zip(order, [*order[1:], *order[-1:]], strict=True))
            for own, rounds in chunks.items():
                chunk[rounds, device] = own
                num_layers[rounds, device] = layers[rounds[-1], device]  # the chunk's own F is the last
                next_chunk[rounds, device] = following[own]
                piece[rounds, device] = range(len(rounds))
        return CopyGrids(chunk, num_layers, next_chunk, piece)

    def _rounds(self, table: RoundTable) -> list[dict[int, list[int]]]:
        """[D] chunk -> the rounds in which its layers are gathered behind others."""
        pieces = table.transfers.get(CopyPieces.name)
        of_devices = []
        for device, first in enumerate(first_forwards(table)):
            later = first[_num_before(table, device, first) :]
            chunks = {int(table.chunk[round_, device]): [round_] for round_ in later}
            in_pieces = pieces.spread.rounds[device] if isinstance(pieces, CopyPieces) else {}
            of_devices.append({chunk: rounds for chunk, rounds in chunks.items() if chunk not in in_pieces})
        return of_devices


@dataclass(frozen=True, eq=False)
class CopyPieces(CopyGathers):
    """Gathers of pieces of layers, behind layers of other chunks and of their own."""

    spread: Spread

    name = "copy_pieces"

    @classmethod
    def of(cls, table: RoundTable) -> CopyPieces:
        """Those of all chunks that have enough F before them."""
        has_layers = np.array(table.layers_per_stage)[table.stage] > 0
        forwards = [np.flatnonzero(column).tolist() for column in ((table.kind == Kind.F) & has_layers).T]
        return cls(spread(table, forwards, first_forwards(table)))

    @property
    def num_pieces(self) -> int:
        """Of a layer."""
        return self.spread.num_pieces

    def _rounds(self, table: RoundTable) -> list[dict[int, list[int]]]:
        return list(self.spread.rounds)


def first_forwards(table: RoundTable) -> list[list[int]]:
    """[D] the rounds of the first F of each chunk with layers, in order."""
    has_layers = np.array(table.layers_per_stage)[table.stage] > 0
    of_devices = []
    for device in range(table.schedule.num_devices):
        rounds = np.flatnonzero((table.kind[:, device] == Kind.F) & has_layers[:, device])
        _, first = np.unique(table.chunk[rounds, device], return_index=True)
        of_devices.append(np.sort(rounds[first]).tolist())
    return of_devices


def _num_before(table: RoundTable, device: int, first: list[int]) -> int:
    """Chunks that a device gathers before any action, of those whose first F are in `first`: 0 or 1."""
    return int(bool(first) and table.stage[first[0], device] > 0)


COPY_GATHERS = CopyGathers()
