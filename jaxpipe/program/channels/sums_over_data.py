"""Sums over `data` and other axes: gradients of layers, beside the action of the round after they are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.lowering import IDLE
from jaxpipe.lowering.transfers.sums_over_data import Left
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel, with_part
from jaxpipe.program.device_sums import reduce_layers
from jaxpipe.program.in_place import sequenced
from jaxpipe.program.shapes import StepShapes


class CompletionRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.sums_over_data`."""

    left: Integers
    chunk: Integers


class Layers(NamedTuple):
    """Layers that are complete and not summed, from the first one on; the chunk is IDLE if there are none."""

    chunk: jax.Array
    stop: jax.Array


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
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> Layers:
        """No layers."""
        return Layers(jnp.int32(IDLE), jnp.int32(0))

    def beside(self, round_type: int, row: Row, carry: Carry, state: State) -> State:
        """Sums what the round before has left."""
        if not self.table.is_at_work(self.name, round_type):
            return state
        return self._summed(carry.of[self.name], state)

    def store(self, round_type: int, row: Row, arrived: Any, carry: Carry) -> Carry:
        """Keeps what this round leaves."""
        # A round late: then the action's message has left, and nobody waits behind the sums.
        line = row.of[self.name]
        num_rows = max(leaf.shape[1] for leaf in jax.tree.leaves(carry.state.grads["layers"]))
        # Over all rows, those that a shorter stage does not use included: their sums are zeros.
        stop = jnp.where(line.left == Left.LAYER, 1, num_rows)
        layers = Layers(jnp.where(line.left == Left.NOTHING, IDLE, line.chunk), jnp.int32(stop))
        return with_part(carry, self.name, layers, carry.state)

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
