"""What a device does in one action: the forward and the backward of one stage for one microbatch, whole or by halves.

All walk the layers of the stage. Forward writes each layer's residuals straight into pages of a pool;
backward reads them in reverse and adds each layer's weight gradient to the running float32 sum in place. Of its
halves I leaves in pages what W needs, which comes later and computes nothing anew.
The first stage's actions begin and end with the embedding, the last stage's forward ends with head, loss
and their backward: what it sends on is the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering import IDLE
from jaxpipe.mesh import Randomness
from jaxpipe.program import residuals
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.guard import when
from jaxpipe.program.halves import Halves
from jaxpipe.program.partition import reduce_chunk
from jaxpipe.program.storage import Pools, Storage
from jaxpipe.schedules.schedule import Kind

PyTree = Any
Integers = Any  # numpy arrays in the table, jax arrays in the program
EMBEDDING = -1  # its place among the layers


class State(NamedTuple):
    """What an action changes, in place."""

    message: jax.Array  # x.shape: before the action what it reads, after it what it produced
    pools: Pools
    grads: PyTree  # float32 running sums: {"shared", "layers": [chunk, layer, ...]}
    loss: PyTree  # float32 running sums, one for each kind of loss
    num_done: jax.Array  # int32: actions so far


class Row(NamedTuple):
    """One device's line of the round table; integers, named as in `jaxpipe.lowering`."""

    kind: Integers
    stage: Integers
    chunk: Integers
    microbatch: Integers
    completes: Integers  # whether the action is the last to add to its chunk's gradients
    next_source: Integers
    keep: Integers
    arrival: Integers  # [permute]
    pages: Integers  # [pool, layer]
    departure: Integers  # [lane]
    num_departures: Integers
    landing: Integers  # [lane]
    num_landings: Integers
    given: Integers  # [lane, (chunk, layer)]
    num_given: Integers
    received: Integers  # [lane, (chunk, layer)]
    num_received: Integers


@dataclass(frozen=True)
class Actions:
    """The actions of one device, over its own parameters and batch."""

    functions: StageFunctions
    params: PyTree  # {"shared", "layers": [chunk, layer, ...]}
    batch: PyTree  # leaves [num_microbatches, ...]
    scale: PyTree  # float32, for each kind of loss: multiplies it
    random: Randomness | None  # of this step, on this device
    first_layer: jax.Array  # [chunk] index in the model of its first layer
    num_held: jax.Array  # [chunk] layers
    static_layers: int | None  # layers of every stage, where they are equal
    num_stages: int
    x_like: jax.ShapeDtypeStruct
    storage: Storage
    halves: Halves | None  # of a layer's backward, where any is in two parts
    keeps_residuals: bool  # False: forwards alone, no gradients
    parts: PyTree  # how devices hold the layers' parameters
    deterministic: bool  # whether sums over devices are added in mesh order

    @property
    def has_reductions(self) -> bool:
        """Whether several devices have terms of the gradient of any layer's parameter."""
        return any(part.is_summed for part in jax.tree.leaves(self.parts))

    def run(self, kind: Kind, row: Row, state: State) -> State:
        """`state` after the action of `kind`, on devices whose row asks for it."""
        action = {
            Kind.F: self._forward,
            Kind.B: self._backward,
            Kind.I: self._input_gradient,
            Kind.W: self._weight_gradient,
        }[kind]

        def act(state: State) -> State:
            return action(row, state)._replace(num_done=state.num_done + 1)

        # Always true, but not for the compiler: an action that writes the pool waits for the one that reads it, so
        # that no copy of the pool is made for the reader.
        is_next = state.num_done >= 0
        return when((row.kind == kind) & is_next, act, state)

    def reduce(self, chunk: jax.Array, state: State) -> State:
        """`state` with the gradients of `chunk` summed over the devices that have terms of them; of IDLE, as it is."""

        def reduce(grads: PyTree) -> PyTree:
            return reduce_chunk(grads, self.parts, chunk, deterministic=self.deterministic)

        layers = when(chunk != IDLE, reduce, state.grads["layers"])
        return state._replace(grads={**state.grads, "layers": layers})

    def _random(self, row: Row, layer: jax.Array | int) -> Randomness | None:
        return None if self.random is None else self.random.at(row.microbatch, layer)

    def _microbatch(self, row: Row) -> PyTree:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row.microbatch, 0, False), self.batch)

    def _layer_params(self, row: Row, layer: jax.Array) -> PyTree:
        return jax.tree.map(lambda leaf: _at(leaf, row.chunk, layer), self.params["layers"])

    def _add_loss(self, total: PyTree, value: PyTree) -> PyTree:
        return jax.tree.map(lambda total, scale, value: total + scale * value, total, self.scale, value)

    def _num_layers(self, row: Row) -> int | jax.Array:
        return self.num_held[row.chunk] if self.static_layers is None else self.static_layers

    def _forward(self, row: Row, state: State) -> State:
        functions, shared, microbatch = self.functions, self.params["shared"], self._microbatch(row)
        x = when(
            row.stage == 0, lambda _: functions.embed(shared, microbatch, self._random(row, EMBEDDING)), state.message
        )

        def layer(i: jax.Array, walk: tuple[jax.Array, Pools]) -> tuple[jax.Array, Pools]:
            x, pools = walk
            random = self._random(row, self.first_layer[row.chunk] + i)
            if not self.keeps_residuals:
                return functions.layer(self._layer_params(row, i), x, microbatch, random), pools
            y, kept = residuals.forward(functions.layer, self._layer_params(row, i), x, microbatch, random)
            return y, self.storage.write_residuals(pools, row.pages[:, i], kept)

        y, pools = lax.fori_loop(0, self._num_layers(row), layer, (x, state.pools))

        def turn_around(ends: tuple[jax.Array, PyTree, PyTree]) -> tuple[jax.Array, PyTree, PyTree]:
            y, loss, sums = ends
            if not self.keeps_residuals:
                return y, self._add_loss(loss, functions.head(shared, y, microbatch)), sums
            value, vjp = jax.vjp(lambda shared, y: functions.head(shared, y, microbatch), shared, y)
            d_shared, dy = vjp(self.scale)
            return dy, self._add_loss(loss, value), add(sums, d_shared)

        ends = (y, state.loss, state.grads["shared"])
        message, loss, sums = when(row.stage == self.num_stages - 1, turn_around, ends)
        return state._replace(message=message, pools=pools, grads={**state.grads, "shared": sums}, loss=loss)

    def _backward(self, row: Row, state: State) -> State:
        def layer(turn: jax.Array, walk: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
            dy, sums = walk
            i, params, given = self._last_first(row, turn)
            kept = self.storage.read_residuals(state.pools, row.pages[:, i])
            d_params, dx = residuals.backward(self.functions.layer, params, kept, self.x_like, dy, *given)
            return dx, _add_layer(sums, row.chunk, i, jax.tree.leaves(d_params))

        dx, layers = lax.fori_loop(0, self._num_layers(row), layer, (state.message, state.grads["layers"]))
        return self._arrive(row, state, dx, layers)

    def _input_gradient(self, row: Row, state: State) -> State:
        assert self.halves
        halves = self.halves

        def layer(turn: jax.Array, walk: tuple) -> tuple:
            dy, sums, left, pools, num_done = walk
            i, params, given = self._last_first(row, turn)

            # What I leaves may take the place of what it reads. In a guard of its own, the reader is done before
            # anything is written; else the compiler would copy the pool for it.
            def compute(walk: tuple) -> tuple:
                dy, sums, _, num_done = walk
                kept = self.storage.read_residuals(pools, row.pages[:, i])
                dx, grads, left = halves.input_gradient(params, kept, dy, *given)
                return dx, _add_layer(sums, row.chunk, i, grads), left, num_done + 1

            dx, sums, left, num_done = when(num_done >= 0, compute, (dy, sums, left, num_done))
            return dx, sums, left, self.storage.write_left(pools, row.pages[:, i], left), num_done

        left = [jnp.zeros(like.shape, like.dtype) for like in self.storage.kept.left]
        walk = state.message, state.grads["layers"], left, state.pools, state.num_done
        dx, layers, _, pools, _ = lax.fori_loop(0, self._num_layers(row), layer, walk)
        return self._arrive(row, state, dx, layers)._replace(pools=pools)

    def _weight_gradient(self, row: Row, state: State) -> State:
        assert self.halves
        halves = self.halves

        def layer(turn: jax.Array, sums: PyTree) -> PyTree:
            i, params, given = self._last_first(row, turn)
            pages = row.pages[:, i]
            kept, left = self.storage.read_for_weights(state.pools, pages), self.storage.read_left(state.pools, pages)
            return _add_layer(sums, row.chunk, i, halves.weight_gradient(params, kept, left, *given))

        layers = lax.fori_loop(0, self._num_layers(row), layer, state.grads["layers"])
        return state._replace(grads={**state.grads, "layers": layers})

    def _last_first(self, row: Row, turn: jax.Array) -> tuple[jax.Array, PyTree, tuple[PyTree, PyTree]]:
        """The layer of a turn when layers are walked in reverse; its parameters; the microbatch and its randomness."""
        i = self._num_layers(row) - 1 - turn
        random = self._random(row, self.first_layer[row.chunk] + i)
        return i, self._layer_params(row, i), (self._microbatch(row), random)

    def _arrive(self, row: Row, state: State, dx: jax.Array, layers: PyTree) -> State:
        """`state` once the gradient of the stage's input is there: the embedding's, or what is sent on."""
        shared, microbatch = self.params["shared"], self._microbatch(row)

        def embed(sums: PyTree) -> PyTree:
            random = self._random(row, EMBEDDING)
            _, vjp = jax.vjp(lambda shared: self.functions.embed(shared, microbatch, random), shared)
            return add(sums, vjp(dx)[0])

        sums = when(row.stage == 0, embed, state.grads["shared"])
        return state._replace(message=dx, grads={"shared": sums, "layers": layers})


def in_turn(
    wanted: jax.Array, action: Callable[[PyTree, jax.Array], PyTree], carry: PyTree, state: State
) -> tuple[PyTree, State]:
    """`action(carry, state.num_done)` where `wanted`, after all that comes before and before what comes after.

    As in `Actions.run`: what writes into storage waits for what reads it, so that it is never copied.
    """

    def act(walk: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        return action(*walk), walk[1] + 1

    carry, num_done = when(wanted & (state.num_done >= 0), act, (carry, state.num_done))
    return carry, state._replace(num_done=num_done)


def _at(leaf: jax.Array, chunk: jax.Array, layer: jax.Array) -> jax.Array:
    """`leaf[chunk, layer]` as a slice."""
    return _slice(leaf, chunk, layer).reshape(leaf.shape[2:])


def _add_at(total: jax.Array, chunk: jax.Array, layer: jax.Array, value: jax.Array) -> jax.Array:
    """`total` with `value` added to `total[chunk, layer]`, in place.

    The sum has the shape of `total`: with one layer the slice is all of `total`, and XLA adds in place only
    where no reshape stands between.
    """
    updated = _slice(total, chunk, layer) + value.astype(total.dtype)[None, None]
    return lax.dynamic_update_slice(total, updated, (chunk, layer) + (0,) * value.ndim)


def _add_layer(totals: PyTree, chunk: jax.Array, layer: jax.Array, grads: Sequence[jax.Array | None]) -> PyTree:
    """Running sums of layers with the gradients of one added; None is nothing to add.

    Args:
        grads: of each leaf.
    """
    leaves, structure = jax.tree.flatten(totals)
    added = [total if d is None else _add_at(total, chunk, layer, d) for total, d in zip(leaves, grads, strict=True)]
    return jax.tree.unflatten(structure, added)


def _slice(leaf: jax.Array, chunk: jax.Array, layer: jax.Array) -> jax.Array:
    """`leaf[chunk, layer]` with its first two axes kept, of size one."""
    return lax.dynamic_slice(leaf, (chunk, layer) + (0,) * (leaf.ndim - 2), (1, 1, *leaf.shape[2:]))


def add(totals: PyTree, values: PyTree) -> PyTree:
    """Running sums with `values` added."""
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, values)
