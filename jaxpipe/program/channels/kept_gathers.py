"""Gathers of weights over `data` into slots that devices keep from action to action: see the transfer."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.transfers.kept_gathers import KeptGathers as KeptGathersTransfer
from jaxpipe.mesh import PyTree
from jaxpipe.mesh.in_order import after
from jaxpipe.program.carry import Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import Index
from jaxpipe.program.weight_copies import gathered_layer, room_for_copies, with_gathered
from jaxpipe.schedules.schedule import Kind


class KeptRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.kept_gathers`; `Row.copied_chunk` is its own slot."""

    chunk: Integers
    into: Integers
    num_layers: Integers
    ahead: Integers


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn gathers a layer of the chunk that comes, and writes it over the one that it has read."""

    step: DeviceStep

    name = "kept_gathers"

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """Layers read the slots that the walk carries."""
        return (), walk._replace(copies=state.copies)

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Gathers the layer with the number of the turn's own; the first action of a device that of the next turn."""
        line = row.of[self.name]
        # Backward walks from the last layer to the first. Layers that a chunk has not are there, too, and never read.
        own = jnp.where(row.kind == Kind.F, turn, self.step.num_layers_of(row) - 1 - turn)
        layer = jnp.minimum(own + line.ahead, max(self.step.shapes.table.layers_per_stage) - 1)
        return gathered_layer(self.step.shapes, self.step.params["layers"], line.chunk, layer), layer

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Writes it, behind all that the turn's layer reads: XLA would else copy the slots for the layer."""
        copy, layer = arrived
        passed = after(jnp.int32(0), walk.passed)
        # Both: the index of a slot is dropped where there is one.
        slot = guarded_index(row.of[self.name].into, passed)
        layer = guarded_index(layer, passed)
        copies = with_gathered(self.step.shapes, walk.copies, copy, slot, layer)
        return carried, walk._replace(copies=copies)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """Gathers what the chunk that comes has more layers than this one."""
        layers = self.step.shapes.table.layers_per_stage
        if min(layers) == max(layers):
            return state._replace(copies=walk.copies)
        line = row.of[self.name]
        num_done = after(state.num_done, walk.passed)
        stacks = _gathered(
            self.step.shapes,
            self.step.params["layers"],
            (line.chunk, line.into),
            (self.step.num_layers_of(row), line.num_layers),
            (walk.copies, num_done),
        )
        return state._replace(copies=stacks[0], num_done=stacks[1])


class KeptGathers(Channel):
    """The channel of kept gathers; all of it hangs on loops over layers."""

    name = "kept_gathers"
    line = KeptRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices hold parts of layers."""
        return any(jax.tree.leaves(shapes.gathered_later))

    @classmethod
    def copy_slots(cls, table: RoundTable) -> np.ndarray:
        """Those of the transfer."""
        return table.grids[cls.name].slot

    @classmethod
    def prepared(cls, shapes: StepShapes, copies: PyTree, state: State) -> State:
        """The first chunk is gathered before any action, or its first layer."""
        transfer = shapes.table.transfers[cls.name]
        assert isinstance(transfer, KeptGathersTransfer)
        chunk, num_layers = (
            jnp.asarray(of_device)[lax.axis_index("pipe")] for of_device in astuple(transfer.before(shapes.table))
        )
        layers = copies["layers"]
        room = room_for_copies(shapes, layers, num_chunks=transfer.num_slots)
        stacks, num_done = _gathered(shapes, layers, (chunk, 0), (0, num_layers), (room, state.num_done))
        return state._replace(copies=stacks, num_done=num_done)

    def on_layers(self) -> OnLayers:
        """All of it."""
        return OnLayers(self.step)


def _gathered(
    shapes: StepShapes,
    held: PyTree,
    chunk_into: tuple[Index, Index],
    ends: tuple[Index, Index],
    slots: tuple[PyTree, jax.Array],
) -> tuple[PyTree, jax.Array]:
    """The slots with layers of a chunk, gathered one after the other, and `num_done`, which waits for them."""
    chunk, into = chunk_into

    def layer(i: jax.Array, walk: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        stacks, num_done = walk
        # A gather waits for the one before, as all collectives in loops do.
        place = guarded_index(i, num_done)
        copy = gathered_layer(shapes, held, chunk, place)
        return with_gathered(shapes, stacks, copy, into, place), after(num_done, copy)

    return lax.fori_loop(*ends, layer, slots)
