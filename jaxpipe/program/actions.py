"""What a device does in one action: the forward and the backward of one stage for one microbatch.

Both walk the layers of the stage. Forward writes each layer's residuals straight into pages of the pool;
backward reads them in reverse and adds each layer's weight gradient to the running float32 sum in place.
The first stage's actions begin and end with the embedding, the last stage's forward ends with head, loss
and their backward: what it sends on is the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax

from jaxpipe.mesh import Randomness
from jaxpipe.program import residuals
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.guard import when
from jaxpipe.program.pages import PageForm
from jaxpipe.program.partition import reduce_chunk
from jaxpipe.schedules.action import Kind

PyTree = Any
Integers = Any  # numpy arrays in the table, jax arrays in the program
EMBEDDING = -1  # its place among the layers


class State(NamedTuple):
    """What an action changes, in place."""

    message: jax.Array  # x.shape: before the action what it reads, after it what it produced
    pool: list[jax.Array]  # [num_pages, width] for each dtype of residuals
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
    pages: Integers  # [layer]
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
    pages: PageForm
    keeps_residuals: bool  # False: forwards alone, no gradients
    parts: PyTree  # how devices hold the layers' parameters
    deterministic: bool  # whether sums over devices are added in mesh order

    @property
    def has_reductions(self) -> bool:
        """Whether several devices have terms of the gradient of any layer's parameter."""
        return any(part.is_summed for part in jax.tree.leaves(self.parts))

    def run(self, kind: Kind, row: Row, state: State) -> State:
        """`state` after the action of `kind`, on devices whose row asks for it."""
        action = {Kind.F: self._forward, Kind.B: self._backward}[kind]

        def act(state: State) -> State:
            return action(row, state)._replace(num_done=state.num_done + 1)

        # Always true, but not for the compiler: an action that writes the pool waits for the one that reads it, so
        # that no copy of the pool is made for the reader.
        is_next = state.num_done >= 0
        return when((row.kind == kind) & is_next, act, state)

    def reduce(self, row: Row, state: State) -> State:
        """`state` with the gradients of a chunk summed over the devices that have terms of them, once complete."""

        def reduce(grads: PyTree) -> PyTree:
            return reduce_chunk(grads, self.parts, row.chunk, deterministic=self.deterministic)

        layers = when(row.completes == 1, reduce, state.grads["layers"])
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

        def layer(i: jax.Array, walk: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
            x, pool = walk
            random = self._random(row, self.first_layer[row.chunk] + i)
            if not self.keeps_residuals:
                return functions.layer(self._layer_params(row, i), x, microbatch, random), pool
            y, kept = residuals.forward(functions.layer, self._layer_params(row, i), x, microbatch, random)
            return y, self.pages.write(pool, row.pages[i], kept)

        y, pool = lax.fori_loop(0, self._num_layers(row), layer, (x, state.pool))

        def turn_around(ends: tuple[jax.Array, PyTree, PyTree]) -> tuple[jax.Array, PyTree, PyTree]:
            y, loss, sums = ends
            if not self.keeps_residuals:
                return y, self._add_loss(loss, functions.head(shared, y, microbatch)), sums
            value, vjp = jax.vjp(lambda shared, y: functions.head(shared, y, microbatch), shared, y)
            d_shared, dy = vjp(self.scale)
            return dy, self._add_loss(loss, value), add(sums, d_shared)

        ends = (y, state.loss, state.grads["shared"])
        message, loss, sums = when(row.stage == self.num_stages - 1, turn_around, ends)
        return state._replace(message=message, pool=pool, grads={**state.grads, "shared": sums}, loss=loss)

    def _backward(self, row: Row, state: State) -> State:
        functions, shared, microbatch = self.functions, self.params["shared"], self._microbatch(row)
        num_layers = self._num_layers(row)

        def layer(turn: jax.Array, walk: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
            dy, sums = walk
            i = num_layers - 1 - turn
            kept = self.pages.read(state.pool, row.pages[i])
            random = self._random(row, self.first_layer[row.chunk] + i)
            layer_params = self._layer_params(row, i)
            d_params, dx = residuals.backward(functions.layer, layer_params, kept, self.x_like, dy, microbatch, random)
            sums = jax.tree.map(lambda total, d: _add_at(total, row.chunk, i, d), sums, d_params)
            return dx, sums

        dx, layers = lax.fori_loop(0, num_layers, layer, (state.message, state.grads["layers"]))

        def embed(sums: PyTree) -> PyTree:
            random = self._random(row, EMBEDDING)
            _, vjp = jax.vjp(lambda shared: functions.embed(shared, microbatch, random), shared)
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


def _slice(leaf: jax.Array, chunk: jax.Array, layer: jax.Array) -> jax.Array:
    """`leaf[chunk, layer]` with its first two axes kept, of size one."""
    return lax.dynamic_slice(leaf, (chunk, layer) + (0,) * (leaf.ndim - 2), (1, 1, *leaf.shape[2:]))


def add(totals: PyTree, values: PyTree) -> PyTree:
    """Running sums with `values` added."""
    return jax.tree.map(lambda total, value: total + value.astype(total.dtype), totals, values)
