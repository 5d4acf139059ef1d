"""Sums over `data` and other axes: gradients of layers, behind the layers of the action that completes their chunk.

Where nothing hangs on layers, all of a chunk is summed beside the action of the round after it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.lowering import IDLE
from jaxpipe.lowering.transfers.sums_over_data import Left
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.device_sums import reduce_layers, reduced_layer, sums_of_layer, with_reduced
from jaxpipe.program.in_place import cond_in_place, sequenced
from jaxpipe.program.shapes import StepShapes


class CompletionRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.sums_over_data`."""

    left: Integers


class Layers(NamedTuple):
    """Layers that are complete and not summed; the chunk is IDLE if there are none."""

    chunk: jax.Array
    first: jax.Array
    stop: jax.Array

    @classmethod
    def none(cls) -> Layers:
        """No layers."""
        return cls(jnp.int32(IDLE), jnp.int32(0), jnp.int32(0))


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn sums the layer of the turn before; the first one that which the device's last completing action has left.

    It carries that layer's gradients: XLA would copy the sums for a reader beside the layer that adds to them.
    """

    step: DeviceStep

    name = "sums_over_data"

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """What has been left."""
        left = state.of[self.name]
        return (left, sums_of_layer(walk.sums, jnp.maximum(left.chunk, 0), left.first)), walk

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Sums it over the devices; nobody keeps the sum if nothing was left."""
        _, sums = carried
        return reduced_layer(sums, self.step.shapes.trained_parts["layers"], deterministic=self.step.deterministic)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Keeps the sum, and reads the layer of this turn."""
        (chunk, index, _), _ = carried
        parts = self.step.shapes.trained_parts["layers"]
        # In a loop of its own. A choice between the sum and what is there would read the sums, and XLA would make one
        # operation of that read and the layer's addition, which needs the sums before and a copy of them.
        sums = cond_in_place(
            chunk != IDLE, lambda sums: with_reduced(sums, arrived, parts, jnp.maximum(chunk, 0), index), walk.sums
        )
        # Backward walks from the last layer to the first.
        index = jnp.int32(self.step.num_layers_of(row) - 1 - turn)
        chunk = jnp.int32(row.chunk)
        return (Layers(chunk, index, index + 1), sums_of_layer(sums, chunk, index)), walk._replace(sums=sums)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """The last layer is left."""
        return state._replace(of={**state.of, self.name: carried[0]})


class SumsOverData(Channel):
    """The channel of sums over devices; it carries the layers that the next round sums."""

    # Carries are sorted by name. With a name that comes first XLA rounds the sums of a BPipe and of a 1F1B on a CPU
    # differently in the last bit, which tests compare.
    name = "sums_over_data"
    line = CompletionRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether gradients of layers have terms on several devices."""
        return any(part.is_summed_once for part in jax.tree.leaves(shapes.trained_parts["layers"]))

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Any) -> Layers:
        """No layers."""
        return Layers.none()

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Any) -> Layers | None:
        """What actions leave; without any, if nothing hangs on layers."""
        return Layers.none() if _is_hung(shapes) else None

    def on_layers(self) -> OnLayers | None:
        """The sums behind layers."""
        return OnLayers(self.step) if _is_hung(self.shapes) else None

    def begin(self, round_type: int, row: Row, carry: Carry) -> tuple[()]:
        """Nothing begins with the round: the sums wait for those of the action that changes them, too."""
        return ()

    def beside(self, round_type: int, row: Row, carry: Carry, state: State) -> State:
        """Sums what the round before has left."""
        if not self.table.is_at_work(self.name, round_type):
            return state
        return self._summed(carry.of[self.name], state)

    def store(self, round_type: int, row: Row, arrived: Any, carry: Carry) -> Carry:
        """Keeps what this round leaves."""
        # A round late: then the action's message has left, and nobody waits behind the sums.
        left = row.of[self.name].left
        num_rows = jax.tree.leaves(carry.state.grads["layers"])[0].shape[1]
        # Over all rows, those that a shorter stage does not use included: their sums are zeros.
        layers = Layers(jnp.where(left == Left.CHUNK, row.chunk, IDLE), jnp.int32(0), jnp.int32(num_rows))
        of_action = carry.state.of[self.name]
        if of_action is not None:
            is_layer = left == Left.LAYER
            layers = jax.tree.map(lambda layer, chunk: jnp.where(is_layer, layer, chunk), of_action, layers)
            of_action = of_action._replace(chunk=jnp.where(is_layer, IDLE, of_action.chunk))
            carry = carry._replace(state=carry.state._replace(of={**carry.state.of, self.name: of_action}))
        return carry._replace(of={**carry.of, self.name: layers})

    def end(self, carry: Carry) -> Carry:
        """Sums what the last round has left."""
        if not self.table.grids[self.name].left[-1].any():
            return carry
        return carry._replace(state=self._summed(carry.of[self.name], carry.state))

    def _summed(self, layers: Layers, state: State) -> State:
        """Returns `state` with the gradients of `layers` summed over the devices that have terms."""

        def reduce(grads: PyTree, _: jax.Array) -> PyTree:
            parts = self.shapes.trained_parts["layers"]
            return reduce_layers(grads, parts, *layers, deterministic=self.step.deterministic)

        # Ordered like an access to storage: on CPUs its collectives would else meet others that stand in loops.
        grads, num_done = sequenced(layers.chunk != IDLE, reduce, state.grads["layers"], state.num_done)
        return state._replace(grads={**state.grads, "layers": grads}, num_done=num_done)


def _is_hung(shapes: StepShapes) -> bool:
    return shapes.table.transfers[SumsOverData.name].hangs(shapes.table) is not None
