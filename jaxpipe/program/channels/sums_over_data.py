"""Sums over `data` and other axes: gradients of layers, behind the layers of the action that completes their chunk.

Where nothing hangs on layers, all of a chunk is summed beside the action of the round after it is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.lowering import IDLE
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.device_sums import reduce_layers, reduced_layer, sums_of_layer, with_reduced
from jaxpipe.program.in_place import sequenced
from jaxpipe.program.shapes import StepShapes


class CompletionRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.sums_over_data`."""

    completes: Integers


class Layer(NamedTuple):
    """A layer that is complete and not summed; the chunk is IDLE if there is none."""

    chunk: jax.Array
    index: jax.Array


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
        return (left, sums_of_layer(walk.sums, jnp.maximum(left.chunk, 0), left.index)), walk

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Sums it over the devices; nobody keeps the sum if nothing was left."""
        _, sums = carried
        return reduced_layer(sums, self.step.shapes.parts["layers"], deterministic=self.step.deterministic)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Keeps the sum, and reads the layer of this turn."""
        (chunk, index), _ = carried
        parts = self.step.shapes.parts["layers"]
        sums = with_reduced(walk.sums, arrived, parts, jnp.maximum(chunk, 0), index, is_kept=chunk != IDLE)
        # Backward walks from the last layer to the first.
        layer = Layer(jnp.int32(row.chunk), jnp.int32(self.step.num_layers_of(row) - 1 - turn))
        return (layer, sums_of_layer(sums, *layer)), walk._replace(sums=sums)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """The last layer is left."""
        return state._replace(of={**state.of, self.name: carried[0]})


class SumsOverData(Channel):
    """The channel of sums over devices; it carries the chunk of which the next round sums what is left, or IDLE."""

    # Carries are sorted by name. With a name that comes first XLA rounds the sums of a BPipe and of a 1F1B on a CPU
    # differently in the last bit, which tests compare.
    name = "sums_over_data"
    line = CompletionRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether gradients of layers have terms on several devices."""
        return any(part.is_summed for part in jax.tree.leaves(shapes.parts["layers"]))

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Any) -> jax.Array:
        """No chunk is complete."""
        return jnp.int32(IDLE)

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Any) -> Layer | None:
        """No layer is left."""
        return Layer(jnp.int32(IDLE), jnp.int32(0)) if _is_hung(shapes) else None

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
        """Keeps the chunk that this round has completed."""
        # A round late: then the action's message has left, and nobody waits behind the sums.
        complete = jnp.where(row.of[self.name].completes == 1, row.chunk, IDLE)
        return carry._replace(of={**carry.of, self.name: complete})

    def end(self, carry: Carry) -> Carry:
        """Sums what the last round has left."""
        if not self.table.grids[self.name].completes[-1].any():
            return carry
        return carry._replace(state=self._summed(carry.of[self.name], carry.state))

    def _summed(self, chunk: jax.Array, state: State) -> State:
        """Returns `state` with what is left of `chunk` summed over the devices that have terms; as is for IDLE."""
        left = state.of[self.name]
        if left is None:  # nothing hangs on layers: all of the chunk
            first, stop = 0, jax.tree.leaves(state.grads["layers"])[0].shape[1]
        else:
            chunk = jnp.where(chunk == IDLE, IDLE, left.chunk)
            first, stop = left.index, left.index + 1
            left = left._replace(chunk=jnp.where(chunk == IDLE, left.chunk, IDLE))
            state = state._replace(of={**state.of, self.name: left})

        def reduce(grads: PyTree, _: jax.Array) -> PyTree:
            parts = self.shapes.parts["layers"]
            return reduce_layers(grads, parts, chunk, first, stop, deterministic=self.step.deterministic)

        # Ordered like an access to storage: on CPUs its collectives would else meet others that stand in loops.
        layers, num_done = sequenced(chunk != IDLE, reduce, state.grads["layers"], state.num_done)
        return state._replace(grads={**state.grads, "layers": layers}, num_done=num_done)


def _is_hung(shapes: StepShapes) -> bool:
    return shapes.table.transfers[SumsOverData.name].hangs(shapes.table) is not None
