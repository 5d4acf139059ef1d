"""Gathers of weights over `data` in every action: each layer's compute copy, behind the layer before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering.transfers.weight_gathers import WEIGHT_GATHERS
from jaxpipe.mesh import PyTree
from jaxpipe.mesh.in_order import after
from jaxpipe.program.carry import Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.weight_copies import gathered_layer
from jaxpipe.schedules.schedule import Kind


class GatherRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.weight_gathers`."""

    next_chunk: Integers
    next_layer: Integers


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn gathers the layer of the next one, and hands it on: that copy is all there is."""

    step: DeviceStep

    name = "weight_gathers"

    @property
    def is_paired(self) -> bool:
        """In all of its actions."""
        return True

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """The first layer has been gathered before."""
        return (), walk._replace(copy=state.of[self.name])

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Gathers the next layer: of this action or, behind its last layer, the one that its row names."""
        num_layers = self.step.num_layers_of(row)
        is_last = turn == num_layers - 1
        # Backward walks from the last layer to the first.
        following = jnp.where(row.kind == Kind.F, turn + 1, num_layers - 2 - turn)
        chunk = jnp.where(is_last, row.of[self.name].next_chunk, row.chunk)
        layer = jnp.where(is_last, row.of[self.name].next_layer, following)
        shapes = self.step.shapes
        return gathered_layer(shapes, self.step.params["layers"], chunk, layer)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Hands it on."""
        return carried, walk._replace(copy=arrived)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """The first layer of the next action is there."""
        return state._replace(of={**state.of, self.name: walk.copy})


class WeightGathers(Channel):
    """The channel of gathers in every action; all of it hangs on loops over layers."""

    name = "weight_gathers"
    line = GatherRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices hold parts of layers."""
        return any(jax.tree.leaves(shapes.gathered_later))

    @classmethod
    def prepared(cls, shapes: StepShapes, copies: PyTree, state: State) -> State:
        """The first layer is gathered before any action."""
        chunk = jnp.asarray(WEIGHT_GATHERS.first_chunk(shapes.table))[lax.axis_index("pipe")]
        # After all that has been gathered before.
        layer = guarded_index(jnp.int32(0), state.num_done)
        copy = gathered_layer(shapes, copies["layers"], chunk, layer)
        return state._replace(of={**state.of, cls.name: copy}, num_done=after(state.num_done, copy))

    def on_layers(self) -> OnLayers:
        """All of it."""
        return OnLayers(self.step)
