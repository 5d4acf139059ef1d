"""Gradients of layers that each action sums over `data`, behind the next layer of that action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import DeviceStep, LayerChannel, Walk
from jaxpipe.program.device_sums import scattered
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.in_place import sequenced
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import with_added


class FlushRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.gradient_shards`."""

    sums: Integers


class Unsummed(NamedTuple):
    """The gradients of a layer that are not summed over devices yet."""

    chunk: jax.Array
    layer: jax.Array
    grads: list[jax.Array]  # [leaf that travels] whole, in the dtypes of their sums
    is_left: jax.Array  # bool; False: they are summed, or there are none


@dataclass(frozen=True)
class OnLayers(LayerChannel):
    """A turn sums the layer of the turn before; the first one the last layer of the action before."""

    step: DeviceStep

    name = "gradient_shards"

    @property
    def is_paired(self) -> bool:
        """In all of its actions."""
        return True

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """What has been left."""
        return state.of[self.name], walk

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Sums it over the devices."""
        return _summed(carried, self.step)

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Adds this device's part to its sums, and takes the gradients of this turn's layer."""
        sums = _with_parts(walk.sums, carried, arrived, self.step.shapes)
        # Backward walks from the last layer to the first.
        layer = jnp.int32(self.step.num_layers_of(row) - 1 - turn)
        assert walk.grads is not None
        left = Unsummed(jnp.int32(row.chunk), layer, walk.grads, jnp.bool_(True))
        return left, walk._replace(sums=sums, grads=None)

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """The last layer is left."""
        return state._replace(of={**state.of, self.name: carried})


class GradientShards(Channel):
    """The channel of gradients that every action sums."""

    name = "gradient_shards"
    line = FlushRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether devices keep parts of sums in a step with gradients."""
        has_parts = any(part.splits_sum for part in jax.tree.leaves(shapes.trained_parts["layers"]))
        return shapes.table.has_backward and has_parts

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> Unsummed:
        """Nothing is left; zeros, as a sum of nothing must be finite."""
        leaves = zip(
            *map(jax.tree.leaves, (shapes.trained_copies["layers"], shapes.trained_parts["layers"])), strict=True
        )
        grads = [jnp.zeros(like.shape, sum_dtype(like.dtype)) for like, part in leaves if part.splits_sum]
        return Unsummed(jnp.int32(0), jnp.int32(0), grads, jnp.bool_(False))

    def on_layers(self) -> OnLayers:
        """All that travels."""
        return OnLayers(self.step)

    def beside(self, round_type: int, row: Row, carry: Carry, state: State) -> State:
        """Sums what is left of a chunk that is complete."""
        if not self.table.is_at_work(self.name, round_type):
            return state
        return self._flushed(row.of[self.name].sums == 1, state)

    def end(self, carry: Carry) -> Carry:
        """Sums what the last action has left."""
        return carry._replace(state=self._flushed(jnp.bool_(True), carry.state))

    def _flushed(self, is_wanted: jax.Array, state: State) -> State:
        left: Unsummed = state.of[self.name]

        def flush(sums: PyTree, _: jax.Array) -> PyTree:
            return _with_parts(sums, left, _summed(left, self.step), self.shapes)

        # Ordered like an access to storage: on CPUs its collectives would else meet others that stand in loops.
        sums, num_done = sequenced(is_wanted, flush, state.grads["layers"], state.num_done)
        left = left._replace(is_left=left.is_left & ~is_wanted)
        of = {**state.of, self.name: left}
        return state._replace(grads={**state.grads, "layers": sums}, num_done=num_done, of=of)


def _summed(left: Unsummed, step: DeviceStep) -> list[jax.Array]:
    parts = [part for part in jax.tree.leaves(step.shapes.trained_parts["layers"]) if part.splits_sum]
    return scattered(left.grads, parts, deterministic=step.deterministic)


def _with_parts(sums: PyTree, left: Unsummed, arrived: list[jax.Array], shapes: StepShapes) -> PyTree:
    values = iter(arrived)

    def added(total: jax.Array, part: Any) -> jax.Array:
        if not part.splits_sum:
            return total
        value = next(values)
        # What is left for nobody may have been summed before.
        return with_added(total, jnp.where(left.is_left, value, jnp.zeros_like(value)), left.chunk, left.layer)

    return jax.tree.map(added, sums, shapes.trained_parts["layers"])
