"""Gathers of compute copies over `data` by devices that keep them: once a step, behind forwards.

The first F of a chunk gathers its layers, one ahead; its last layer gathers the first one of the next chunk. Where
enough F of other chunks stand before it, these gather the layers with it, a piece each (`jaxpipe.lowering.spread`). A
device whose first F waits for a message gathers that chunk before any action, while the pipeline fills; one that begins
at once, its first layer alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.spread import Spread, orders_in_rounds, spread_gathers
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
        for device, stages in enumerate(self._rounds(table)):
            hangs[[round_ for rounds in stages.values() for round_ in rounds], device] = True
        return hangs

    def before(self, table: RoundTable) -> GatheredBefore:
        """What precedes the actions."""
        layers = np.array(table.layers_per_stage)
        chunk, num_layers, next_chunk, num_turns = np.zeros((4, table.schedule.num_devices), np.int32)
        for device, order in enumerate(orders_in_rounds(table, Kind.F)):
            rounds = order.first.tolist()
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
        chunk = table.chunk.copy()
        num_layers = layers.copy()
        next_chunk = chunk.copy()
        piece = np.zeros_like(chunk)
        of_devices = zip(orders_in_rounds(table, Kind.F), self._rounds(table), strict=True)
        for device, (order, stages) in enumerate(of_devices):
            chunks = table.chunk[order.first, device].tolist()
            following = dict(zip(chunks, [*chunks[1:], *chunks[-1:]], strict=True))
            for rounds in stages.values():
                own = rounds[-1], device  # the chunk's own F is the last
                chunk[rounds, device] = table.chunk[own]
                num_layers[rounds, device] = layers[own]
                next_chunk[rounds, device] = following[int(table.chunk[own])]
                piece[rounds, device] = range(len(rounds))
        return CopyGrids(chunk, num_layers, next_chunk, piece)

    def _rounds(self, table: RoundTable) -> list[dict[int, list[int]]]:
        """[D] stage -> the rounds in which its layers are gathered behind others."""
        pieces = table.transfers.get(CopyPieces.name)
        of_devices = []
        for device, order in enumerate(orders_in_rounds(table, Kind.F)):
            first = order.first.tolist()
            later = first[_num_before(table, device, first) :]
            stages = {int(table.stage[round_, device]): [round_] for round_ in later}
            in_pieces = pieces.spread.places[device] if isinstance(pieces, CopyPieces) else {}
            of_devices.append({stage: rounds for stage, rounds in stages.items() if stage not in in_pieces})
        return of_devices


@dataclass(frozen=True, eq=False)
class CopyPieces(CopyGathers):
    """Gathers of pieces of layers, behind layers of other chunks and of their own."""

    spread: Spread

    name = "copy_pieces"

    @classmethod
    def of(cls, table: RoundTable) -> CopyPieces:
        """Those of all chunks that have enough F before them."""
        return cls(spread_gathers(orders_in_rounds(table, Kind.F), table.layers_per_stage))

    @property
    def num_pieces(self) -> int:
        """Of a layer."""
        return self.spread.num_pieces

    def _rounds(self, table: RoundTable) -> list[dict[int, list[int]]]:
        return list(self.spread.places)


def _num_before(table: RoundTable, device: int, first: list[int]) -> int:
    """Chunks that a device gathers before any action, of those whose first F are in `first`: 0 or 1."""
    return int(bool(first) and table.stage[first[0], device] > 0)


COPY_GATHERS = CopyGathers()
