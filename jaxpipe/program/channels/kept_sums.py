"""Gradients of layers in slots, whole, until their chunk leaves: added by each action, summed over `data` then."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering.transfers.kept_sums import KeptSums as KeptSumsTransfer
from jaxpipe.lowering.transfers.kept_sums import LeavingSums as LeavingSumsTransfer
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.channels.gradient_shards import GradientShards
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.device_sums import scattered
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.in_place import after, guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import Index, slice_at, with_added, with_slice

SLOTS = "kept_sums"  # what `State.of` calls the slots: [leaf that travels] [slot, layer, ...]


class SlotRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.kept_sums`."""

    slot: Integers


class LeavingRow(NamedTuple):
    """Likewise."""

    chunk: Integers
    into: Integers
    num_layers: Integers
    ahead: Integers


class Leaving(NamedTuple):
    """A layer's gradients that the next turn sums over devices."""

    layer: jax.Array
    grads: list[jax.Array]  # zeros: none


@dataclass(frozen=True)
class Adding(LayerChannel):
    """A turn adds its layer's gradients in the slot of its chunk."""

    step: DeviceStep

    name = SLOTS

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """The walk carries the slots."""
        return (), walk._replace(slots=state.of[SLOTS])

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Nothing travels."""
        return ()

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Adds them."""
        layer = self.step.num_layers_of(row) - 1 - turn
        assert walk.grads is not None
        at = row.of[SLOTS].slot, layer
        slots = [with_added(slot, grad, *at) for slot, grad in zip(walk.slots, walk.grads, strict=True)]
        return (), walk._replace(slots=slots, grads=None)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """All is added."""
        return state._replace(of={**state.of, SLOTS: walk.slots})


@dataclass(frozen=True)
class Summing(LayerChannel):
    """A turn sums a layer of the chunk that leaves, which the turn before has taken out of its slot."""

    step: DeviceStep

    name = "leaving_sums"

    @property
    def is_paired(self) -> bool:
        """Layers are handed on."""
        return True

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """Takes the layer with the number of the first turn's own; of the last action what has been added so far."""
        line = row.of[self.name]
        num_layers = self.step.num_layers_of(row)
        num_done = after(state.num_done, walk.passed)
        layers = self.step.shapes.table.layers_per_stage
        if min(layers) < max(layers):  # the chunk that leaves may have more layers than there are turns
            ends = num_layers, line.num_layers
            sums, slots, num_done = _left(self.step, (line.chunk, line.into), ends, (walk.sums, walk.slots, num_done))
            walk = walk._replace(sums=sums, slots=slots)
        return self._taken(row, guarded_index(jnp.int32(num_layers - 1), num_done), jnp.bool_(True), walk)

    def begin(self, turn: jax.Array, row: Row, carried: Leaving) -> PyTree:
        """Sums it over the devices."""
        return _summed(self.step, carried.grads)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: Leaving, walk: Walk) -> tuple[PyTree, Walk]:
        """Adds this device's part to its sums, and takes the next turn's layer; of the last action this turn's."""
        line = row.of[self.name]
        walk = walk._replace(sums=_with_parts(self.step.shapes, walk.sums, arrived, line.chunk, carried.layer))
        own = self.step.num_layers_of(row) - 1 - turn
        is_last = own == 0
        # Behind all that the turn has added.
        layer = guarded_index(jnp.where(is_last, 0, own - 1 + line.ahead), after(jnp.int32(0), walk.passed))
        return self._taken(row, layer, ~is_last, walk)

    def last(self, row: Row, carried: Leaving, walk: Walk, state: State) -> State:
        """Nothing is left on its way."""
        return state._replace(of={**state.of, SLOTS: walk.slots})

    def _taken(self, row: Row, layer: Index, is_wanted: jax.Array, walk: Walk) -> tuple[Leaving, Walk]:
        at = row.of[self.name].into, layer
        there = [slice_at(slot, *at) for slot in walk.slots]
        taken = [jnp.where(is_wanted, value, jnp.zeros_like(value)) for value in there]
        left = [jnp.where(is_wanted, jnp.zeros_like(value), value) for value in there]
        slots = [with_slice(slot, value, *at) for slot, value in zip(walk.slots, left, strict=True)]
        return Leaving(jnp.int32(layer), [value[0, 0] for value in taken]), walk._replace(slots=slots)


class KeptSums(Channel):
    """The channel that adds."""

    name = SLOTS
    line = SlotRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices keep parts of sums in a step with gradients."""
        return GradientShards.is_needed(shapes)

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Any) -> list[jax.Array]:
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
        taken = [slice_at(slot, into, place) for slot in slots]
        slots = [with_slice(slot, jnp.zeros_like(value), into, place) for slot, value in zip(slots, taken, strict=True)]
        arrived = _summed(step, [value[0, 0] for value in taken])
        return _with_parts(step.shapes, sums, arrived, chunk, place), slots, after(num_done, arrived)

    return lax.fori_loop(*ends, layer, sums)


def _summed(step: DeviceStep, grads: list[jax.Array]) -> list[jax.Array]:
    parts = [part for part in jax.tree.leaves(step.shapes.trained_parts["layers"]) if part.splits_sum]
    return scattered(grads, parts, deterministic=step.deterministic)


def _with_parts(shapes: StepShapes, sums: PyTree, arrived: list[jax.Array], chunk: Index, layer: Index) -> PyTree:
    values = iter(arrived)

    def added(total: jax.Array, part: Any) -> jax.Array:
        return with_added(total, next(values), chunk, layer) if part.splits_sum else total

    return jax.tree.map(added, sums, shapes.trained_parts["layers"])
