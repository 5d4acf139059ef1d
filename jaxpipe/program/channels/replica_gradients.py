"""Gradients of replicas: those of one layer a lane, from a stage's other holder to its owner, who adds them.

Gradients are read into a buffer at the end of a round, sent in the next one, and added at the end of that one, in
place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Integers, State
from jaxpipe.program.channel import BufferedChannel
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.partition import Part
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import slice_at, with_added
from jaxpipe.program.storage import Page, Pool, pool_for


class GradientRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.replica_gradients`."""

    send_layer: Integers  # [lane, (chunk, layer)]
    num_sends: Integers
    recv_layer: Integers  # [lane, (chunk, layer)]
    num_recvs: Integers


class ReplicaGradients(BufferedChannel):
    """The channel of gradients of layers that two devices hold."""

    name = "replica_gradients"
    line = GradientRow
    in_program = "exchange"

    @classmethod
    def pool(cls, shapes: StepShapes) -> Pool:
        """Of one layer's gradients."""
        return pool_for(1, shapes.sent_layer)

    def target(self, state: State) -> PyTree:
        """The running sums of layers."""
        return state.grads["layers"]

    def with_target(self, state: State, target: PyTree) -> State:
        """See `BufferedChannel`."""
        return state._replace(grads={**state.grads, "layers": target})

    def store_lane(self, line: GradientRow, lane: int, page: Page, target: PyTree) -> PyTree:
        """Adds gradients to the sums that the table names."""
        chunk = line.recv_layer[lane, 0]
        layer = line.recv_layer[lane, 1]
        # A reduced part is smaller than its sum and stands at its beginning, where `with_added` adds.
        leaves = self.shapes.sent_layer.read(page, self.pool(self.shapes), 0)
        values = jax.tree.unflatten(jax.tree.structure(target), leaves)

        def added(total: jax.Array, value: jax.Array, part: Part) -> jax.Array:
            at = self.step.row_of(part, chunk, layer)
            if part.kinds is None:
                return with_added(total, value, chunk, at)
            # What a layer of another kind does not have is sent all the same: pages of all layers are alike.
            return with_added(total, jnp.where(at >= 0, value, 0), chunk, jnp.maximum(at, 0))

        return jax.tree.map(added, target, values, self.shapes.trained_parts["layers"])

    def read_lane(self, line: GradientRow, lane: int, state: State, page: Page, num_done: jax.Array) -> Page:
        """Reads the gradients of a layer."""
        form = self.shapes.sent_layer
        # Else XLA reads the sums outside of the guard, and copies them. One index is enough: both are of one read.
        chunk = guarded_index(line.send_layer[lane, 0], num_done)
        layer = line.send_layer[lane, 1]
        sums = jax.tree.leaves(state.grads["layers"])
        parts = jax.tree.leaves(self.shapes.trained_parts["layers"])
        values = []
        for total, part, like in zip(sums, parts, form.arrays, strict=True):
            at = self.step.row_of(part, chunk, layer)
            at = at if part.kinds is None else jnp.maximum(at, 0)
            values.append(slice_at(total, chunk, at, shape=like.shape))
        return form.write(page, self.pool(self.shapes), 0, values)
