"""Gradients of replicas: those of one layer a lane, from a stage's other holder to its owner, who adds them.

Gradients are read into a buffer at the end of a round, sent in the next one, and added at the end of that one, in
place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxpipe.lowering import RoundTable
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row
from jaxpipe.program.channel import Channel, read_lanes, store_lanes, with_part
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import slice_at, with_added
from jaxpipe.program.storage import Page, empty_pages, pool_for


class GradientRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.replica_gradients`."""

    send_layer: Integers  # [lane, (chunk, layer)]
    num_sends: Integers
    recv_layer: Integers  # [lane, (chunk, layer)]
    num_recvs: Integers


class ReplicaGradients(Channel):
    """The channel of gradients of layers that two devices hold."""

    name = "replica_gradients"
    in_program = "exchange"
    has_buffers = True

    @classmethod
    def rows(cls, table: RoundTable) -> GradientRow:
        """Layers to send and to add."""
        grids = table.grids[cls.name]
        return GradientRow(grids.send_layer, grids.num_sends, grids.recv_layer, grids.num_recvs)

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> list[Page]:
        """[lane] empty buffers."""
        pool = pool_for(1, shapes.sent_layer)
        return [empty_pages(pool, 1, empty) for _ in range(shapes.table.num_lanes(cls.name))]

    def begin(self, round_type: int, row: Row, carry: Carry) -> list[Page]:
        """Sends the gradients read at the end of the round before; returns the arrived ones, [lane]."""
        return self.send(round_type, carry.of[self.name])

    def store(self, round_type: int, row: Row, arrived: Sequence[Page], carry: Carry) -> Carry:
        """Adds the arrived gradients to the sums that the table names."""
        state = carry.state
        line = row.of[self.name]
        form = self.shapes.sent_layer

        def add_layer(lane: int, page: Page, sums: PyTree, _: jax.Array) -> PyTree:
            chunk = line.recv_layer[lane, 0]
            layer = line.recv_layer[lane, 1]
            # A reduced part is smaller than its sum and stands at its beginning, where `with_added` adds.
            values = jax.tree.unflatten(jax.tree.structure(sums), form.read(page, pool_for(1, form), 0))
            return jax.tree.map(lambda total, value: with_added(total, value, chunk, layer), sums, values)

        layers, num_done = store_lanes(line.num_recvs, arrived, add_layer, state.grads["layers"], state.num_done)
        state = state._replace(grads={**state.grads, "layers": layers}, num_done=num_done)
        return carry._replace(state=state)

    def read(self, round_type: int, row: Row, carry: Carry) -> Carry:
        """Reads the gradients that travel in the next round."""
        state = carry.state
        line = row.of[self.name]
        form = self.shapes.sent_layer
        sums = jax.tree.leaves(state.grads["layers"])

        def read_layer(lane: int, page: Page, num_done: jax.Array) -> Page:
            # Else XLA reads the sums outside of the guard, and copies them. One index is enough: both are of one read.
            chunk = guarded_index(line.send_layer[lane, 0], num_done)
            layer = line.send_layer[lane, 1]
            values = [
                slice_at(total, chunk, layer, shape=like.shape) for total, like in zip(sums, form.arrays, strict=True)
            ]
            return form.write(page, pool_for(1, form), 0, values)

        # The most of any device: all trace the same lanes.
        num_sends = self.table.grids[self.name].num_sends[self.table.round_type == round_type]
        grads, num_done = read_lanes(num_sends.max(), line.num_sends, carry.of[self.name], read_layer, state.num_done)
        return with_part(carry, self.name, grads, state._replace(num_done=num_done))
