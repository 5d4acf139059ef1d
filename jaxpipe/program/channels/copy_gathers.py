"""Gathers of compute copies over `data`, once a step: each layer's copy, or pieces of it, behind other layers."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering.transfers.copy_gathers import CopyGathers as CopyGathersTransfer
from jaxpipe.mesh import PyTree
from jaxpipe.mesh.in_order import after
from jaxpipe.program.carry import Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.partition import Piece
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.weight_copies import gathered_layer, room_for_copies, with_gathered


class CopyRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.copy_gathers`."""

    chunk: Integers
    num_layers: Integers
    next_chunk: Integers
    piece: Integers


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn gathers a layer that is needed later, or a piece of it, and writes it into the stack of copies."""

    step: DeviceStep
    name: str
    num_pieces: int

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """Layers read the stack that the walk carries."""
        return (), walk._replace(copies=state.copies)

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Gathers what its row names."""
        line = row.of[self.name]
        is_next = turn + 1 >= line.num_layers
        chunk = jnp.where(is_next, line.next_chunk, line.chunk)
        layer = jnp.where(is_next, 0, turn + 1)
        shapes = self.step.shapes
        piece = Piece(line.piece, self.num_pieces)
        return gathered_layer(shapes, self.step.params["layers"], chunk, layer, piece), (chunk, layer)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Writes it, behind all that the turn's layer reads: XLA would else copy the stack for the layer."""
        copy, (chunk, layer) = arrived
        passed = after(jnp.int32(0), walk.passed)
        # Both: the index of a chunk is dropped where there is one chunk.
        chunk = guarded_index(chunk, passed)
        layer = guarded_index(layer, passed)
        piece = Piece(row.of[self.name].piece, self.num_pieces)
        copies = with_gathered(self.step.shapes, walk.copies, copy, chunk, layer, piece)
        return carried, walk._replace(copies=copies)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """What has been gathered is there."""
        return state._replace(copies=walk.copies)


class CopyGathers(Channel):
    """The channel of whole layers; all of it hangs on loops over layers."""

    name = "copy_gathers"
    line = CopyRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices hold parts of layers."""
        return any(jax.tree.leaves(shapes.gathered_later))

    @classmethod
    def prepared(cls, shapes: StepShapes, copies: PyTree, state: State) -> State:
        """What is gathered before any action: the copies of some layers, or of the first layer."""
        transfer = shapes.table.transfers[cls.name]
        assert isinstance(transfer, CopyGathersTransfer)
        chunk, num_layers, next_chunk, num_turns = (
            jnp.asarray(of_device)[lax.axis_index("pipe")] for of_device in astuple(transfer.before(shapes.table))
        )
        layers = copies["layers"]

        def layer(i: jax.Array, walk: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            stacks, num_done = walk
            is_first = i < num_layers
            # A gather waits for the one before, as all collectives in loops do.
            place = jnp.where(is_first, chunk, next_chunk), guarded_index(jnp.where(is_first, i, 0), num_done)
            copy = gathered_layer(shapes, layers, *place)
            return with_gathered(shapes, stacks, copy, *place), after(num_done, copy)

        room = room_for_copies(shapes, layers)
        stacks, num_done = lax.fori_loop(0, num_turns, layer, (room, state.num_done))
        return state._replace(copies=stacks, num_done=num_done)

    def on_layers(self) -> OnLayers:
        """All of it."""
        transfer = self.table.transfers[self.name]
        assert isinstance(transfer, CopyGathersTransfer)
        return OnLayers(self.step, self.name, transfer.num_pieces)


class CopyPieces(CopyGathers):
    """The channel of pieces of layers."""

    name = "copy_pieces"

    @classmethod
    def prepared(cls, shapes: StepShapes, copies: PyTree, state: State) -> State:
        """No piece is gathered before any action."""
        return state
