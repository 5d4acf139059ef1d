"""Gradients of layers in slots, whole, until their chunk leaves: added by each action, summed over `data` then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering.transfers.kept_sums import KeptSums as KeptSumsTransfer
from jaxpipe.lowering.transfers.kept_sums import LeavingSums as LeavingSumsTransfer
from jaxpipe.mesh import PyTree
from jaxpipe.mesh.in_order import after
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.channels.gradient_shards import GradientShards
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.device_sums import scattered
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import Index, slice_at, with_added, with_slice

SLOTS = "kept_sums"  # what `State.of` calls the slots: [leaf that travels] [slot, layer, ...]


class SlotRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.kept_sums`."""

    slot: Integers


class LeavingRow(NamedTuple):
    """Likewise."""

    slot: Integers
    chunk: Integers
    into: Integers
    num_layers: Integers
    ahead: Integers


@dataclass(frozen=True)
class Adding(LayerChannel):
    """A turn adds its layer's gradients in the slot of its chunk."""

    step: DeviceStep

    name = SLOTS

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """The slots."""
        return state.of[SLOTS], walk

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Nothing travels."""
        return ()

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Adds them."""
        return _added(self.step, turn, row.of[self.name].slot, row, carried, walk)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """All is added."""
        return state._replace(of={**state.of, SLOTS: carried})


@dataclass(frozen=True)
class Summing(LayerChannel):
    """A turn sums a layer of the chunk that leaves, and adds its own in its place, or in another slot."""

    step: DeviceStep

    name = "leaving_sums"

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """Sums what the chunk that leaves has more layers than there are turns, behind nothing."""
        layers = self.step.shapes.table.layers_per_stage
        slots = state.of[SLOTS]
        if min(layers) == max(layers):
            return (slots, state.num_done), walk
        line = row.of[self.name]
        ends = self.step.num_layers_of(row), line.num_layers
        num_done = after(state.num_done, walk.passed)
        sums, slots, num_done = _left(self.step, (line.chunk, line.into), ends, (walk.sums, slots, num_done))
        return (slots, num_done), walk._replace(sums=sums)

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Sums the layer with the number of the turn's own; the last action of a device that of the turn before."""
        layers = self.step.shapes.table.layers_per_stage
        line = row.of[self.name]
        own = self.step.num_layers_of(row) - 1 - turn
        slots, num_done = carried
        # After what `first` has summed.
        layer = guarded_index(jnp.minimum(own + line.ahead, max(layers) - 1), num_done)
        return _summed(self.step, _layer(slots, line.into, layer)), layer

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Adds this device's part to its sums, and makes room."""
        line = row.of[self.name]
        values, layer = arrived
        sums = _with_parts(self.step.shapes, walk.sums, values, line.chunk, layer)
        slots = _emptied(carried[0], line.into, layer, values)
        slots, walk = _added(self.step, turn, line.slot, row, slots, walk._replace(sums=sums))
        return (slots, carried[1]), walk

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """All is added."""
        return state._replace(of={**state.of, SLOTS: carried[0]})


class KeptSums(Channel):
    """The channel that adds."""

    name = SLOTS
    line = SlotRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices keep parts of sums in a step with gradients."""
        return GradientShards.is_needed(shapes)

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> list[jax.Array]:
        """Sums of nothing."""
        transfer = shapes.table.transfers[SLOTS]
        assert isinstance(transfer, KeptSumsTransfer)
        room = transfer.num_slots, max(shapes.table.layers_per_stage)
        copies, parts = map(jax.tree.leaves, (shapes.trained_copies["layers"], shapes.trained_parts["layers"]))
        return [
            jnp.zeros((*room, *copy.shape), sum_dtype(copy.dtype))
            for copy, part in zip(copies, parts, strict=True)
            if part.splits_sum
        ]

    def on_layers(self) -> Adding:
        """All of it."""
        return Adding(self.step)


class LeavingSums(Channel):
    """The channel that sums over devices."""

    name = "leaving_sums"
    line = LeavingRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """As of the slots."""
        return GradientShards.is_needed(shapes)

    def on_layers(self) -> Summing:
        """All but what follows the last action."""
        return Summing(self.step)

    def end(self, carry: Carry) -> Carry:
        """Sums what the last action has left."""
        state = carry.state
        transfer = self.table.transfers[self.name]
        assert isinstance(transfer, LeavingSumsTransfer)
        chunk, num_layers = (
            jnp.asarray(of_device)[lax.axis_index("pipe")] for of_device in astuple(transfer.after(self.table))
        )
        sums, _, num_done = _left(
            self.step, (chunk, 0), (0, num_layers), (state.grads["layers"], state.of[SLOTS], state.num_done)
        )
        return carry._replace(state=state._replace(grads={**state.grads, "layers": sums}, num_done=num_done))


Sums = tuple[PyTree, list[jax.Array], jax.Array]  # running sums, slots, and what orders accesses to storage


def _left(step: DeviceStep, chunk_into: tuple[Index, Index], ends: tuple[Index, Index], sums: Sums) -> Sums:
    """Running sums with layers of a chunk in its slot, summed over devices one after the other."""
    chunk, into = chunk_into

    def layer(i: jax.Array, walk: Sums) -> Sums:
        sums, slots, num_done = walk
        # A sum waits for the one before, as all collectives in loops do.
        place = guarded_index(i, num_done)
        arrived = _summed(step, _layer(slots, into, place))
        sums = _with_parts(step.shapes, sums, arrived, chunk, place)
        return sums, _emptied(slots, into, place, arrived), after(num_done, arrived)

    return lax.fori_loop(*ends, layer, sums)


def _added(
    step: DeviceStep, turn: jax.Array, slot: Index, row: Row, slots: list[jax.Array], walk: Walk
) -> tuple[list[jax.Array], Walk]:
    """The slots with the gradients of the turn's layer, which the walk gives up."""
    assert walk.grads is not None
    # Backward walks from the last layer to the first.
    at = slot, step.num_layers_of(row) - 1 - turn
    added = [with_added(sums, grad, *at) for sums, grad in zip(slots, walk.grads, strict=True)]
    return added, walk._replace(grads=None)


def _emptied(slots: list[jax.Array], into: Index, layer: jax.Array, arrived: list[jax.Array]) -> list[jax.Array]:
    """The slots with zeros in place of a layer, once it has been read: XLA would else copy them."""
    # What has arrived has read it.
    at = into, guarded_index(layer, after(jnp.int32(0), arrived))
    return [with_slice(slot, jnp.zeros((1, 1, *slot.shape[2:]), slot.dtype), *at) for slot in slots]


def _layer(slots: list[jax.Array], into: Index, layer: Index) -> list[jax.Array]:
    return [slice_at(slot, into, layer)[0, 0] for slot in slots]


def _summed(step: DeviceStep, grads: list[jax.Array]) -> list[jax.Array]:
    parts = [part for part in jax.tree.leaves(step.shapes.trained_parts["layers"]) if part.splits_sum]
    return scattered(grads, parts, deterministic=step.deterministic)


def _with_parts(shapes: StepShapes, sums: PyTree, arrived: list[jax.Array], chunk: Index, layer: Index) -> PyTree:
    values = iter(arrived)

    def added(total: jax.Array, part: Any) -> jax.Array:
        return with_added(total, next(values), chunk, layer) if part.splits_sum else total

    return jax.tree.map(added, sums, shapes.trained_parts["layers"])
