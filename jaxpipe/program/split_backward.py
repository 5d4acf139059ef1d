"""The backward in two parts: I finds the gradient of a stage's input, W those of its weights.

I stores the inputs of its W in pages; W comes later, and computes nothing again but what is elementwise.
"""

from __future__ import annotations

import jax

from jaxpipe.program.carry import Row, State
from jaxpipe.program.device import Action, DeviceStep, Walk
from jaxpipe.program.in_place import before_writes, guarded_index
from jaxpipe.program.layer_form import LayerForm
from jaxpipe.schedules.schedule import Kind


def input_gradient(step: DeviceStep, row: Row, state: State) -> State:
    """I: the gradient of the stage's input, and what W needs beside the residuals."""

    def layer(form: LayerForm, turn: jax.Array, walk: Walk) -> Walk:
        split = form.split
        storage = form.storage
        assert split
        i, params, given = step.last_first(row, form, turn, walk, state)

        def compute(read: Walk) -> Walk:
            # Else XLA moves the reads out of a loop, away from what could read the pool itself.
            residuals = storage.read_residuals(walk.pools, guarded_index(row.pages[:, i], read.num_done))
            dx, grads, deferred = split.input_gradient(params, residuals, read.passed, step.layer_scale, *given)
            read = step.with_gradients(read, row, form, i, grads)
            deferred = {**read.deferred, form.place: deferred}
            return read._replace(passed=dx, deferred=deferred, num_done=read.num_done + 1)

        # Deferred arrays may overwrite residuals that I reads; what reads does not carry the pools, which it would hand
        # on as if it had changed them.
        read, pools = before_writes(
            compute, walk._replace(pools=None), walk.pools, walk.num_done, by_barrier=step.barriers_order
        )
        return read._replace(pools=storage.write_deferred(pools, row.pages[:, i], read.deferred[form.place]))

    walk = Walk(
        step.boundary.output_gradient(step, row, state),
        state.grads["layers"],
        state.pools,
        # Room that all layers of a form share: I's loop writes it, the pool is written from it.
        deferred={
            form.place: [jax.lax.empty(like.shape, like.dtype) for like in form.storage.saved.deferred]
            for form in step.shapes.forms
        },
        num_done=state.num_done,
    )
    walk, state = step.over_layers(row, layer, walk, state, is_reverse=True)
    state = state._replace(pools=walk.pools, grads={**state.grads, "layers": walk.sums})
    return step.boundary.end_backward(step, row, walk.passed, state)


def weight_gradient(step: DeviceStep, row: Row, state: State) -> State:
    """W: the gradients of the stage's weights that I has left."""

    def layer(form: LayerForm, turn: jax.Array, walk: Walk) -> Walk:
        split = form.split
        storage = form.storage
        assert split
        i, params, given = step.last_first(row, form, turn, walk, state)
        pages = row.pages[:, i]
        # From the state, which W does not change: no guard is needed, as nothing is written beside it.
        shared = storage.read_shared_with_w(state.pools, pages)
        deferred = storage.read_deferred(state.pools, pages)
        grads = split.weight_gradient(params, shared, deferred, step.layer_scale, *given)
        return step.with_gradients(walk, row, form, i, grads)

    walk, state = step.over_layers(row, layer, Walk(sums=state.grads["layers"]), state, is_reverse=True)
    return state._replace(grads={**state.grads, "layers": walk.sums})


ACTIONS: dict[Kind, Action] = {Kind.I: input_gradient, Kind.W: weight_gradient}
