"""Sums over `data` behind layers: gradients of layers, or pieces of them, once their chunk is complete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.lowering import IDLE
from jaxpipe.lowering.transfers.layer_sums import LayerSums as LayerSumsTransfer
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.channels.sums_over_data import SumsOverData
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.device_sums import reduced_layer, sums_of_layer, with_reduced
from jaxpipe.program.in_place import cond_in_place
from jaxpipe.program.partition import Piece
from jaxpipe.program.shapes import StepShapes


class SumRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.layer_sums`."""

    chunk: Integers
    num_layers: Integers
    before: Integers
    piece: Integers


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn sums what the turn before has read; the first one the layer that the chunk before has left.

    It carries these gradients: XLA would copy the sums for a reader beside the layer that adds to them.
    """

    step: DeviceStep
    name: str
    num_pieces: int

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """What has been left: the first layer of a chunk."""
        return self._read(walk.sums, row, jnp.int32(row.of[self.name].before), jnp.int32(0)), walk

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Sums it over the devices; nobody keeps the sum if nothing was left."""
        _, sums = carried
        return reduced_layer(sums, self.step.shapes.trained_parts["layers"], deterministic=self.step.deterministic)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Keeps the sum, and reads what the next turn sums."""
        (chunk, layer), _ = carried
        parts = self.step.shapes.trained_parts["layers"]
        piece = self._piece(row)
        # In a loop of its own. A choice between the sum and what is there would read the sums, and XLA would make one
        # operation of that read and the layer's addition, which needs the sums before and a copy of them.
        sums = cond_in_place(
            chunk != IDLE,
            lambda sums: with_reduced(sums, arrived, parts, jnp.maximum(chunk, 0), layer, piece),
            walk.sums,
        )
        # Backward walks from the last layer to the first, which is left for the next chunk's actions.
        line = row.of[self.name]
        layer = jnp.int32(line.num_layers - 1 - turn)
        chunk = jnp.where(layer > 0, jnp.int32(line.chunk), IDLE)
        return self._read(sums, row, chunk, jnp.maximum(layer, 0)), walk._replace(sums=sums)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """What has been read last is left."""
        return state

    def _piece(self, row: Row) -> Piece:
        return Piece(row.of[self.name].piece, self.num_pieces)

    def _read(self, sums: PyTree, row: Row, chunk: jax.Array, layer: jax.Array) -> PyTree:
        parts = self.step.shapes.trained_parts["layers"]
        return (chunk, layer), sums_of_layer(sums, parts, jnp.maximum(chunk, 0), layer, self._piece(row))


class LayerSums(Channel):
    """The channel of whole layers; all of it hangs on loops over layers."""

    name = "layer_sums"
    line = SumRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether the parameters of layers have terms on several devices."""
        return SumsOverData.is_needed(shapes)

    def on_layers(self) -> OnLayers:
        """All of it."""
        transfer = self.table.transfers[self.name]
        assert isinstance(transfer, LayerSumsTransfer)
        return OnLayers(self.step, self.name, transfer.num_pieces)


class SumPieces(LayerSums):
    """The channel of pieces of layers."""

    name = "sum_pieces"
