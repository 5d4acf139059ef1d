"""Gathers of weights over `data`: each layer's compute copy, behind the layer before in the first F of its chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import slice_at
from jaxpipe.program.weight_copies import gathered_layer, with_gathered


class GatherRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.weight_gathers`."""

    next_chunk: Integers


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn gathers the layer of the next one, and hands it on beside the stack of all copies.

    The loop writes the stack and never reads it, so that XLA writes in place.
    """

    step: DeviceStep

    name = "weight_gathers"

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """The first layer has been gathered before."""
        copy = jax.tree.map(lambda stack: slice_at(stack, row.chunk, 0)[0, 0], state.copies)
        return state.copies, walk._replace(copy=copy)

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Gathers the next layer: of this chunk or, behind its last layer, of the next one."""
        is_last = turn == self.step.num_layers_of(row) - 1
        chunk = jnp.where(is_last, row.of[self.name].next_chunk, row.chunk)
        layer = jnp.where(is_last, 0, turn + 1)
        shapes = self.step.shapes
        return gathered_layer(self.step.of[self.name], shapes.parts["layers"], shapes.copies["layer"], chunk, layer), (
            chunk,
            layer,
        )

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Keeps it."""
        copy, place = arrived
        stacks = with_gathered(carried, copy, self.step.shapes.parts["layers"], *place)
        return stacks, walk._replace(copy=copy)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """All of the chunk's copies are there."""
        return state._replace(copies=carried)


class WeightGathers(Channel):
    """The channel of gathers; all of it hangs on loops over layers."""

    name = "weight_gathers"
    line = GatherRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices hold parts of layers."""
        return any(part.master_dim is not None for part in jax.tree.leaves(shapes.parts["layers"]))

    def begin(self, round_type: int, row: Row, carry: Carry) -> tuple[()]:
        """Nothing begins with a round."""
        return ()

    def store(self, round_type: int, row: Row, arrived: Any, carry: Carry) -> Carry:
        """Nothing has arrived."""
        return carry

    def on_layers(self) -> OnLayers:
        """All of it."""
        return OnLayers(self.step)
