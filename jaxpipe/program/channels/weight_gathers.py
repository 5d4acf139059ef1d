"""Gathers of weights over `data`: each layer's compute copy, behind the layer before it."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.transfers.weight_gathers import WeightGathers as WeightGathersTransfer
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.in_place import after, guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import Index, slice_at
from jaxpipe.program.weight_copies import gathered_later, gathered_layer, room_for_copies, with_gathered
from jaxpipe.schedules.schedule import Kind


class GatherRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.weight_gathers`."""

    next_chunk: Integers
    next_layer: Integers


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn gathers the layer of the next one, and hands it on.

    Where a device keeps all copies the loop writes them into their stack and never reads that, so that XLA writes in
    place; else the copy that is handed on is all there is.
    """

    step: DeviceStep
    by_action: bool  # whether every action gathers its layers

    name = "weight_gathers"

    @property
    def is_paired(self) -> bool:
        """Whether it hands layers on in all actions."""
        return self.by_action

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """The first layer has been gathered before."""
        if self.by_action:
            return (), walk._replace(copy=state.of[self.name])
        copy = jax.tree.map(lambda stack: slice_at(stack, row.chunk, 0)[0, 0], state.copies)
        return state.copies, walk._replace(copy=copy)

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Gathers the next layer: of this action or, behind its last layer, the one that its row names."""
        num_layers = self.step.num_layers_of(row)
        is_last = turn == num_layers - 1
        # Backward walks from the last layer to the first; whoever keeps all copies gathers in F alone.
        following = jnp.where(row.kind == Kind.F, turn + 1, num_layers - 2 - turn) if self.by_action else turn + 1
        chunk = jnp.where(is_last, row.of[self.name].next_chunk, row.chunk)
        layer = jnp.where(is_last, row.of[self.name].next_layer, following)
        return _gathered(self.step.shapes, self.step.params["layers"], chunk, layer), (chunk, layer)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Keeps it."""
        copy, place = arrived
        if not self.by_action:
            carried = with_gathered(carried, copy, _later(self.step.shapes), *place)
        return carried, walk._replace(copy=copy)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """All of the chunk's copies are there, or the first one of the next action."""
        if self.by_action:
            return state._replace(of={**state.of, self.name: walk.copy})
        return state._replace(copies=carried)


class WeightGathers(Channel):
    """The channel of gathers; all of it hangs on loops over layers."""

    name = "weight_gathers"
    line = GatherRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices hold parts of layers."""
        return any(jax.tree.leaves(_later(shapes)))

    @classmethod
    def prepared(cls, shapes: StepShapes, copies: PyTree, state: State) -> State:
        """What is gathered before any action: the copies of some layers, or of the first layer."""
        table = shapes.table
        transfer = _transfer(table)
        chunk, num_layers, next_chunk, num_turns = (
            jnp.asarray(of_device)[lax.axis_index("pipe")] for of_device in astuple(transfer.before(table))
        )
        layers = copies["layers"]
        if transfer.by_action:
            # After all that has been gathered before.
            copy = _gathered(shapes, layers, next_chunk, guarded_index(jnp.int32(0), state.num_done))
            return state._replace(of={**state.of, cls.name: copy}, num_done=after(state.num_done, copy))

        def layer(i: jax.Array, walk: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
            stacks, num_done = walk
            is_first = i < num_layers
            # A gather waits for the one before, as all collectives in loops do.
            place = jnp.where(is_first, chunk, next_chunk), guarded_index(jnp.where(is_first, i, 0), num_done)
            copy = _gathered(shapes, layers, *place)
            return with_gathered(stacks, copy, _later(shapes), *place), after(num_done, copy)

        room = room_for_copies(layers, _later(shapes), shapes.copies["layer"])
        stacks, num_done = lax.fori_loop(0, num_turns, layer, (room, state.num_done))
        return state._replace(copies=stacks, num_done=num_done)

    def begin(self, round_type: int, row: Row, carry: Carry) -> tuple[()]:
        """Nothing begins with a round."""
        return ()

    def store(self, round_type: int, row: Row, arrived: Any, carry: Carry) -> Carry:
        """Nothing has arrived."""
        return carry

    def on_layers(self) -> OnLayers:
        """All of it."""
        return OnLayers(self.step, _transfer(self.table).by_action)


def _transfer(table: RoundTable) -> WeightGathersTransfer:
    transfer = table.transfers[WeightGathers.name]
    assert isinstance(transfer, WeightGathersTransfer)
    return transfer


def _later(shapes: StepShapes) -> PyTree:
    return gathered_later(shapes.table, shapes.parts["layers"])


def _gathered(shapes: StepShapes, held: PyTree, chunk: Index, layer: Index) -> PyTree:
    return gathered_layer(held, _later(shapes), shapes.parts["layers"], shapes.copies["layer"], chunk, layer)
