"""The backward in two parts: I finds the gradient of a stage's input, W those of its weights.

I stores the inputs of its W in pages; W comes later and recomputes nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.program.carry import Row, State
from jaxpipe.program.device import Action, DeviceStep, add_layer
from jaxpipe.program.in_place import guarded_index, once
from jaxpipe.schedules.schedule import Kind

PyTree = Any


def input_gradient(step: DeviceStep, row: Row, state: State) -> State:
    """I: the gradient of the stage's input, and what W needs beside the residuals."""
    split, storage, boundary = step.shapes.split, step.shapes.storage, step.boundary
    assert split

    def layer(turn: jax.Array, walk: tuple) -> tuple:
        dy, sums, deferred, pools, num_done = walk
        i, params, given = step.last_first(row, turn)

        # Deferred arrays may overwrite residuals that I reads. In its own loop, the reader ends before anything is
        # written; else the compiler would copy the pool for the reader.
        def compute(walk: tuple) -> tuple:
            dy, sums, _, num_done = walk
            # Else XLA moves the reads out of the loop, away from what could read the pool itself.
            residuals = storage.read_residuals(pools, guarded_index(row.pages[:, i], num_done))
            dx, grads, deferred = split.input_gradient(params, residuals, dy, step.layer_scale, *given)
            return dx, add_layer(sums, row.chunk, i, grads), deferred, num_done + 1

        dx, sums, deferred, num_done = once(compute, (dy, sums, deferred, num_done), num_done)
        pools = storage.write_deferred(pools, row.pages[:, i], deferred)
        return dx, sums, deferred, pools, num_done

    deferred = [jnp.zeros(like.shape, like.dtype) for like in storage.saved.deferred]
    dy = boundary.output_gradient(step, row, state)
    walk = dy, state.grads["layers"], deferred, state.pools, state.num_done
    dx, layers, _, pools, _ = lax.fori_loop(0, step.num_layers_of(row), layer, walk)
    state = state._replace(pools=pools, grads={**state.grads, "layers": layers})
    return boundary.end_backward(step, row, dx, state)


def weight_gradient(step: DeviceStep, row: Row, state: State) -> State:
    """W: the gradients of the stage's weights that I has left."""
    split, storage = step.shapes.split, step.shapes.storage
    assert split

    def layer(turn: jax.Array, sums: PyTree) -> PyTree:
        i, params, given = step.last_first(row, turn)
        pages = row.pages[:, i]
        shared = storage.read_shared_with_w(state.pools, pages)
        deferred = storage.read_deferred(state.pools, pages)
        grads = split.weight_gradient(params, shared, deferred, step.layer_scale, *given)
        return add_layer(sums, row.chunk, i, grads)

    layers = lax.fori_loop(0, step.num_layers_of(row), layer, state.grads["layers"])
    return state._replace(grads={**state.grads, "layers": layers})


ACTIONS: dict[Kind, Action] = {Kind.I: input_gradient, Kind.W: weight_gradient}
