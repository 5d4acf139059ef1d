"""The actions of a device: forward and backward of one stage for one microbatch, the backward whole or split.

All actions walk the layers of the stage. Forward writes each layer's residuals straight into pages of a pool;
backward reads them in reverse and adds each layer's weight gradient to the running float32 sum in place. In a split
backward, I stores the inputs of its W in pages; W comes later and recomputes nothing.
The first stage's actions begin and end with the embedding. The last stage's forward ends with head, loss
and their backward: its message is the gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering import IDLE
from jaxpipe.mesh import BATCH_AXES, Randomness, with_losses
from jaxpipe.program import over_pipe
from jaxpipe.program.carry import Row, State
from jaxpipe.program.contract import Losses, StageFunctions
from jaxpipe.program.ends import embed_backward, head_backward
from jaxpipe.program.in_place import cond_in_place, guarded_index, once, sequenced
from jaxpipe.program.partition import reduce_chunk
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import slice_at, with_added
from jaxpipe.program.staged_params import StagedLayout
from jaxpipe.program.storage import Pools
from jaxpipe.schedules.schedule import Kind

PyTree = Any
EMBEDDING = -1  # its index among the layers, for random numbers


@dataclass(frozen=True)
class Actions:
    """The actions of one device, over its own parameters and batch."""

    functions: StageFunctions
    shapes: StepShapes
    params: PyTree  # compute copies {"shared", "layers": [chunk, layer, ...]}
    batch: PyTree  # leaves [num_microbatches, ...]
    scale: Losses  # float32, a factor for each kind of loss
    random: Randomness | None  # of this step, on this device
    first_layer: jax.Array  # [chunk] index in the model of its first layer
    num_layers: jax.Array  # [chunk]
    static_num_layers: int | None  # layers of every stage if equal and several, which XLA then knows; else None
    deterministic: bool  # whether sums over devices are added in mesh order
    in_turn: bool  # whether an action waits for the permutes of its round: see `mesh.collectives_in_turn`
    updates: Any = None  # `updates.Updates` in a run without flush; then batch, scale and random are [lap, ...]

    @classmethod
    def on_this_device(
        cls,
        functions: StageFunctions,
        shapes: StepShapes,
        layout: StagedLayout,
        *,
        params: PyTree,
        batch: PyTree,
        scale: PyTree,
        key: jax.Array | None,
        deterministic: bool,
        in_turn: bool,
    ) -> Actions:
        """The actions of the device that traces this inside `shard_map`."""
        layers_per_stage = shapes.table.layers_per_stage
        # Of a loop of one turn XLA moves nothing out, and computes it again in every element that needs it.
        is_known = len(set(layers_per_stage)) == 1 and layers_per_stage[0] > 1
        device, microbatch_size = lax.axis_index("pipe"), jax.tree.leaves(batch)[0].shape[1]
        return cls(
            functions=functions,
            shapes=shapes,
            params=params,
            batch=batch,
            scale=shapes.losses.apart(scale),
            random=None if key is None else Randomness(key, lax.axis_index(BATCH_AXES) * microbatch_size),
            first_layer=jnp.asarray(layout.first_layer)[device],
            num_layers=jnp.asarray(layout.num_held)[device],
            static_num_layers=layers_per_stage[0] if is_known else None,
            deterministic=deterministic,
            in_turn=in_turn,
        )

    @property
    def has_reductions(self) -> bool:
        """Whether gradients of layers are summed over devices when they are complete; an UPDATE does it itself."""
        return not self.updates and any(part.is_summed for part in jax.tree.leaves(self.shapes.parts["layers"]))

    def run(self, kind: Kind, row: Row, state: State) -> State:
        """Returns `state` after the action of `kind`, on devices whose row has it."""

        def act(state: State) -> State:
            if kind is Kind.UPDATE:
                after = self.updates.of_stage(self, row, state)
            else:
                after = self._in_batch(ACTIONS[kind], row, state) if self.updates else ACTIONS[kind](self, row, state)
            return after._replace(num_done=state.num_done + 1)

        # As in `sequenced`: an action that writes the pool waits for the one that reads it, so that XLA makes no copy
        # of the pool for the reader.
        is_next = state.num_done >= 0
        return cond_in_place((row.kind == kind) & is_next, act, state)

    def _in_batch(self, action: Callable[[Actions, Row, State], State], row: Row, state: State) -> State:
        """Runs `action` with the weights, tokens, factors, random numbers and sums of losses of its batch."""
        lap = row.run.lap
        batch, scale, random = over_pipe.read((self.batch, self.scale, self.random), lap)
        here = replace(self, params=state.run.copies, batch=batch, scale=scale, random=random)
        after = action(here, row, state._replace(loss=over_pipe.read(state.loss, lap)))
        return after._replace(loss=over_pipe.written(state.loss, lap, after.loss))

    def reduce(self, chunk: jax.Array, state: State) -> State:
        """Returns `state` with the gradients of `chunk` summed over the devices that have terms; as is for IDLE."""

        def reduce(grads: PyTree, _: jax.Array) -> PyTree:
            return reduce_chunk(grads, self.shapes.parts["layers"], chunk, deterministic=self.deterministic)

        layers, num_done = sequenced(chunk != IDLE, reduce, state.grads["layers"], state.num_done)
        return state._replace(grads={**state.grads, "layers": layers}, num_done=num_done)

    @property
    def _layer_scale(self) -> PyTree:
        """The factors of the losses of a layer, in their shapes."""
        losses = self.shapes.losses.layers
        return jax.tree.map(lambda one, factor: jnp.broadcast_to(factor, one.shape), losses, self.scale.layers)

    def _random(self, row: Row, layer: jax.Array | int) -> Randomness | None:
        return None if self.random is None else self.random.at(row.microbatch, layer)

    def _microbatch(self, row: Row) -> PyTree:
        return over_pipe.read(self.batch, row.microbatch)

    def _is_last(self, row: Row) -> jax.Array:
        return row.stage == self.shapes.table.schedule.num_stages - 1

    def _layer_params(self, row: Row, layer: jax.Array) -> PyTree:
        chunk = row.run.copied_chunk if self.updates else row.chunk
        return jax.tree.map(lambda leaf: slice_at(leaf, chunk, layer)[0, 0], self.params["layers"])

    def num_layers_of(self, row: Row) -> int | jax.Array:
        """Layers of the stage in `row`."""
        return self.num_layers[row.chunk] if self.static_num_layers is None else self.static_num_layers

    def _forward(self, row: Row, state: State) -> State:
        functions, shared, microbatch = self.functions, self.params["shared"], self._microbatch(row)
        vjp = self.shapes.vjp
        x = cond_in_place(row.stage == 0, lambda _: self._embed(row, state, microbatch), state.message)

        def layer(i: jax.Array, walk: tuple[jax.Array, Pools, PyTree]) -> tuple[jax.Array, Pools, PyTree]:
            x, pools, totals = walk
            place = self.first_layer[row.chunk] + i
            random = self._random(row, place)
            if vjp is None:
                found = functions.layer(self._layer_params(row, i), x, microbatch, random)
            else:
                found, residuals = vjp.forward(self._layer_params(row, i), x, microbatch, random)
                pools = self.shapes.storage.write_residuals(pools, row.pages[:, i], residuals)
            y, losses = with_losses(found)
            return y, pools, _add_of_layer(totals, place, self.scale.layers, losses)

        losses = self.shapes.losses.apart(state.loss)
        y, pools, of_layers = lax.fori_loop(0, self.num_layers_of(row), layer, (x, state.pools, losses.layers))

        def turn_around(walk: tuple[jax.Array, PyTree, PyTree]) -> tuple[jax.Array, PyTree, PyTree]:
            y, loss, sums = walk
            if not self.shapes.table.has_backward:
                return y, _add_scaled(loss, self.scale.head, functions.head(shared, y, microbatch)), sums
            value, dy, sums = head_backward(functions, shared, y, microbatch, self.scale.head, sums)
            return dy, _add_scaled(loss, self.scale.head, value), sums

        if functions.over_pipe:
            ends = self._left(row, self._is_last(row), y, state)
            return state._replace(message=y, pools=pools, loss=Losses(losses.head, of_layers).joined, ends=ends)
        message, of_head, sums = cond_in_place(self._is_last(row), turn_around, (y, losses.head, state.grads["shared"]))
        loss = Losses(of_head, of_layers).joined
        return state._replace(message=message, pools=pools, grads={**state.grads, "shared": sums}, loss=loss)

    def _backward(self, row: Row, state: State) -> State:
        assert self.shapes.vjp
        vjp = self.shapes.vjp

        def layer(turn: jax.Array, walk: tuple[jax.Array, PyTree]) -> tuple[jax.Array, PyTree]:
            dy, sums = walk
            i, params, given = self._last_first(row, turn)
            residuals = self.shapes.storage.read_residuals(state.pools, row.pages[:, i])
            result = (dy, self._layer_scale) if self.scale.layers else dy
            d_params, dx = vjp.backward(params, residuals, result, *given)
            return dx, _add_layer(sums, row.chunk, i, jax.tree.leaves(d_params))

        dx, layers = lax.fori_loop(0, self.num_layers_of(row), layer, (self._dy(row, state), state.grads["layers"]))
        return self._finish_backward(row, state, dx, layers)

    def _input_gradient(self, row: Row, state: State) -> State:
        assert self.shapes.split
        split, storage = self.shapes.split, self.shapes.storage

        def layer(turn: jax.Array, walk: tuple) -> tuple:
            dy, sums, deferred, pools, num_done = walk
            i, params, given = self._last_first(row, turn)

            # Deferred arrays may overwrite residuals that I reads. In its own loop, the reader ends before anything is
            # written; else the compiler would copy the pool for the reader.
            def compute(walk: tuple) -> tuple:
                dy, sums, _, num_done = walk
                # Else XLA moves the reads out of the loop, away from what could read the pool itself.
                residuals = storage.read_residuals(pools, guarded_index(row.pages[:, i], num_done))
                dx, grads, deferred = split.input_gradient(params, residuals, dy, self._layer_scale, *given)
                return dx, _add_layer(sums, row.chunk, i, grads), deferred, num_done + 1

            dx, sums, deferred, num_done = once(compute, (dy, sums, deferred, num_done), num_done)
            pools = storage.write_deferred(pools, row.pages[:, i], deferred)
            return dx, sums, deferred, pools, num_done

        deferred = [jnp.zeros(like.shape, like.dtype) for like in storage.saved.deferred]
        walk = self._dy(row, state), state.grads["layers"], deferred, state.pools, state.num_done
        dx, layers, _, pools, _ = lax.fori_loop(0, self.num_layers_of(row), layer, walk)
        return self._finish_backward(row, state, dx, layers)._replace(pools=pools)

    def _weight_gradient(self, row: Row, state: State) -> State:
        assert self.shapes.split
        split, storage = self.shapes.split, self.shapes.storage

        def layer(turn: jax.Array, sums: PyTree) -> PyTree:
            i, params, given = self._last_first(row, turn)
            pages = row.pages[:, i]
            shared = storage.read_shared_with_w(state.pools, pages)
            deferred = storage.read_deferred(state.pools, pages)
            return _add_layer(
                sums, row.chunk, i, split.weight_gradient(params, shared, deferred, self._layer_scale, *given)
            )

        layers = lax.fori_loop(0, self.num_layers_of(row), layer, state.grads["layers"])
        return state._replace(grads={**state.grads, "layers": layers})

    # Embedding and head, if they are split over `pipe`; see `over_pipe`

    def rows(self, microbatch: jax.Array) -> jax.Array:
        """This device's term of the rows of a microbatch's tokens; of any microbatch for NO_MICROBATCH."""
        assert self.functions.over_pipe
        return self.functions.over_pipe.rows(
            self.params["shared"], over_pipe.read(self.batch, jnp.maximum(microbatch, 0))
        )

    def scatter(self, microbatch: jax.Array, dx: jax.Array, sums: PyTree) -> PyTree:
        """Returns sums of the shared parameters' gradients with those of the embedding added."""
        assert self.functions.over_pipe
        random = None if self.random is None else self.random.at(microbatch, EMBEDDING)
        of_microbatch = over_pipe.read(self.batch, microbatch)
        return self.functions.over_pipe.embed_backward(self.params["shared"], of_microbatch, random, dx, sums)

    def _embed(self, row: Row, state: State, microbatch: PyTree) -> jax.Array:
        functions, shared = self.functions, self.params["shared"]
        random = self._random(row, EMBEDDING)
        if not functions.over_pipe:
            return functions.embed(shared, microbatch, random)
        return functions.over_pipe.embed(
            shared, over_pipe.read(state.ends.entries, row.ends.entry_in), microbatch, random
        )

    def _left(self, row: Row, is_wanted: jax.Array, value: jax.Array, state: State) -> over_pipe.Ends:
        """The storage with `value` in the entry of the action, if it is wanted."""

        def write(entries: jax.Array) -> jax.Array:
            return over_pipe.written(entries, row.ends.entry_out, value)

        return state.ends._replace(entries=cond_in_place(is_wanted, write, state.ends.entries))

    def _dy(self, row: Row, state: State) -> jax.Array:
        """The gradient of the stage's output."""
        if not self.functions.over_pipe:
            return state.message
        return cond_in_place(
            self._is_last(row), lambda _: over_pipe.read(state.ends.entries, row.ends.entry_in), state.message
        )

    def _head_statistics(self, row: Row, state: State) -> State:
        assert self.functions.over_pipe
        x = over_pipe.read(state.ends.entries, row.ends.entry_in)
        kept, own = self.functions.over_pipe.statistics(self.params["shared"], x, self._microbatch(row))
        ends = state.ends._replace(own=over_pipe.written(state.ends.own, row.ends.slot, own))
        if self.shapes.table.has_backward:
            ends = ends._replace(kept=over_pipe.written(ends.kept, row.ends.slot, kept))
        return state._replace(ends=ends)

    def _head_gradients(self, row: Row, state: State) -> State:
        assert self.functions.over_pipe
        head, ends, shared, microbatch = (
            self.functions.over_pipe,
            state.ends,
            self.params["shared"],
            self._microbatch(row),
        )
        statistics = over_pipe.read(ends.statistics, row.ends.slot)
        # All devices know the loss; one counts it.
        counted = jax.tree.map(lambda factor: jnp.where(lax.axis_index("pipe") == 0, factor, 0.0), self.scale.head)
        losses = self.shapes.losses.apart(state.loss)
        of_head = _add_scaled(losses.head, counted, head.losses(shared, statistics, microbatch))
        state = state._replace(loss=Losses(of_head, losses.layers).joined)
        if not self.shapes.table.has_backward:
            return state
        x, kept = over_pipe.read(ends.entries, row.ends.entry_in), over_pipe.read(ends.kept, row.ends.slot)
        dx, sums = head.gradients(shared, x, kept, statistics, microbatch, self.scale.head, state.grads["shared"])
        ends = ends._replace(entries=over_pipe.written(ends.entries, row.ends.entry_out, dx))
        return state._replace(grads={**state.grads, "shared": sums}, ends=ends)

    def _last_first(self, row: Row, turn: jax.Array) -> tuple[jax.Array, PyTree, tuple[PyTree, PyTree]]:
        """The layer of a turn in a reverse walk, its parameters, and the microbatch with its randomness."""
        i = self.num_layers_of(row) - 1 - turn
        random = self._random(row, self.first_layer[row.chunk] + i)
        return i, self._layer_params(row, i), (self._microbatch(row), random)

    def _finish_backward(self, row: Row, state: State, dx: jax.Array, layers: PyTree) -> State:
        """Returns `state` with `dx`, the gradient of the stage's input, as the message, or passed to the embedding."""
        if self.functions.over_pipe:
            ends = self._left(row, row.stage == 0, dx, state)
            return state._replace(message=dx, grads={**state.grads, "layers": layers}, ends=ends)
        shared, microbatch = self.params["shared"], self._microbatch(row)

        def embed(sums: PyTree) -> PyTree:
            return embed_backward(self.functions, shared, microbatch, self._random(row, EMBEDDING), dx, sums)

        sums = cond_in_place(row.stage == 0, embed, state.grads["shared"])
        return state._replace(message=dx, grads={"shared": sums, "layers": layers})


ACTIONS: dict[Kind, Callable[[Actions, Row, State], State]] = {
    Kind.F: Actions._forward,
    Kind.B: Actions._backward,
    Kind.I: Actions._input_gradient,
    Kind.W: Actions._weight_gradient,
    Kind.S: Actions._head_statistics,
    Kind.T: Actions._head_gradients,
}


def _add_scaled(totals: PyTree, scale: PyTree, values: PyTree) -> PyTree:
    """Returns sums of losses with those of one microbatch added, each times its factor."""
    return jax.tree.map(lambda total, scale, value: total + scale * value, totals, scale, values)


def _add_of_layer(totals: PyTree, layer: jax.Array, scale: PyTree, values: PyTree) -> PyTree:
    """The same with the losses of one layer; an array is added at the layer's index in the model."""

    def add(total: jax.Array, scale: jax.Array, value: jax.Array) -> jax.Array:
        if not value.ndim:
            return total + scale * value
        return lax.dynamic_update_index_in_dim(total, total[layer] + scale * value, layer, 0)

    return jax.tree.map(add, totals, scale, values)


def _add_layer(totals: PyTree, chunk: jax.Array, layer: jax.Array, grads: Sequence[jax.Array | None]) -> PyTree:
    """Returns running sums of layers with the gradients of one layer added.

    Args:
        totals: running sums, leaves [chunk, layer, ...].
        chunk, layer: indices of the layer.
        grads: [leaf] gradients of the layer; None adds nothing.
    """
    leaves, structure = jax.tree.flatten(totals)
    added = [total if d is None else with_added(total, d, chunk, layer) for total, d in zip(leaves, grads, strict=True)]
    return jax.tree.unflatten(structure, added)
