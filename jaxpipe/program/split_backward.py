"""The backward in two parts: I finds the gradient of a stage's input, W those of its weights.

I stores the inputs of its W in pages; W comes later, and computes nothing again but what is elementwise.
"""

from __future__ import annotations

import jax

from jaxpipe.program.carry import Row, State
from jaxpipe.program.device import Action, DeviceStep, Walk, add_layer
from jaxpipe.program.in_place import after, guarded_index
from jaxpipe.schedules.schedule import Kind


def input_gradient(step: DeviceStep, row: Row, state: State) -> State:
    """I: the gradient of the stage's input, and what W needs beside the residuals."""
    split = step.shapes.split
    storage = step.shapes.storage
    assert split

    def layer(turn: jax.Array, walk: Walk) -> Walk:
        i, params, given = step.last_first(row, turn)

        residuals = storage.read_residuals(walk.pools, row.pages[:, i])
        dx, grads, deferred = split.input_gradient(params, residuals, walk.passed, step.layer_scale, *given)
        # Deferred arrays may overwrite residuals that I reads: their pages wait for all that is computed from these.
        # Else the compiler would copy the pool for the reader.
        num_done = after(walk.num_done, (dx, [d for d in grads if d is not None], deferred))
        pages = jax.tree.map(lambda page: guarded_index(page, num_done), row.pages[:, i])
        pools = storage.write_deferred(walk.pools, pages, deferred)
        return Walk(dx, add_layer(walk.sums, row.chunk, i, grads), pools, num_done=num_done + 1)

    walk = Walk(
        step.boundary.output_gradient(step, row, state),
        state.grads["layers"],
        state.pools,
        num_done=state.num_done,
    )
    walk, state = step.over_layers(Kind.I, row, layer, walk, state)
    state = state._replace(pools=walk.pools, grads={**state.grads, "layers": walk.sums})
    return step.boundary.end_backward(step, row, walk.passed, state)


def weight_gradient(step: DeviceStep, row: Row, state: State) -> State:
    """W: the gradients of the stage's weights that I has left."""
    split = step.shapes.split
    storage = step.shapes.storage
    assert split

    def layer(turn: jax.Array, walk: Walk) -> Walk:
        i, params, given = step.last_first(row, turn)
        pages = row.pages[:, i]
        # From the state, which W does not change: no guard is needed, as nothing is written beside it.
        shared = storage.read_shared_with_w(state.pools, pages)
        deferred = storage.read_deferred(state.pools, pages)
        grads = split.weight_gradient(params, shared, deferred, step.layer_scale, *given)
        return Walk(sums=add_layer(walk.sums, row.chunk, i, grads))

    walk, state = step.over_layers(Kind.W, row, layer, Walk(sums=state.grads["layers"]), state)
    return state._replace(grads={**state.grads, "layers": walk.sums})


ACTIONS: dict[Kind, Action] = {Kind.I: input_gradient, Kind.W: weight_gradient}
