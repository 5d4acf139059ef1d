"""UPDATE: the optimizer's step of a stage's layers, one after the other and in place; no stage waits for another.

Of each layer it sums the gradient over the devices that have terms, changes master and moments, makes the compute copy
of the next version in the place of the one that is no longer used, and sets the running gradient to zero.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Row, State
from jaxpipe.program.device import DeviceStep
from jaxpipe.program.device_sums import sum_of_parts
from jaxpipe.program.in_place import cond_in_place
from jaxpipe.program.optimizer_step import NAME, DeviceOptimizer, NewValues, UpdateState, squares_of
from jaxpipe.program.stacked import slice_at, with_slice


def update_layers(optimizer: DeviceOptimizer, step: DeviceStep, row: Row, state: State) -> State:
    """Returns `state` after the UPDATE of the stage in `row`."""

    def layer(i: jax.Array, walk: tuple[UpdateState, PyTree, NewValues]) -> tuple[UpdateState, PyTree, NewValues]:
        return _update_layer(optimizer, row, i, *walk)

    update = state.of[NAME]
    first = partial(_layer_of, at=(0, 0))
    like = NewValues(
        first(update.masters), optimizer.nodes_of(update, first), update.squares["layers"], jnp.bool_(True)
    )
    # The third is room for new values that all layers share: made in the loop, it would be filled for each.
    walk = update, state.grads["layers"], jax.tree.map(jnp.zeros_like, like)
    update, layers, _ = lax.fori_loop(0, step.num_layers_of(row), layer, walk)
    return state._replace(of={**state.of, NAME: update}, grads={**state.grads, "layers": layers})


def _update_layer(
    optimizer: DeviceOptimizer, row: Row, i: jax.Array, update: UpdateState, sums: PyTree, room: NewValues
) -> tuple[UpdateState, PyTree, NewValues]:
    """What updates change, and the running sums, after layer `i`; and the room for new values, for the next layer."""
    parts = optimizer.parts["layers"]
    deterministic = optimizer.deterministic
    at = row.chunk, i

    def make(_: NewValues) -> NewValues:
        grads = jax.tree.map(
            # A Part knows nothing of [chunk, layer], and the optimizer's trees have both: taken off, and put on again.
            lambda leaf, part: part.reduce(slice_at(leaf, *at)[0, 0], deterministic=deterministic)[None, None],
            sums,
            parts,
        )
        squares = squares_of(grads)
        totals = sum_of_parts(
            jax.tree.leaves(squares),
            jax.tree.leaves(parts),
            # Other stages are at other layers: over `pipe` nobody would answer.
            beside=("pipe",),
            deterministic=deterministic,
        )
        is_finite = jnp.isfinite(totals.sum())  # on all devices of the layer
        choose = partial(_layer_of, at=at)
        nodes = optimizer.nodes_of(update, choose)
        new = optimizer.stepped(update, {"shared": {}, "layers": grads}, is_finite, choose(update.masters), nodes)
        return NewValues(*new, squares, is_finite)

    # A guard of its own orders all reads before the in-place writes; otherwise XLA copies every array that is still
    # read. The condition is always true, which XLA cannot prove. New values have room that all layers share: an array
    # of its own would be filled first.
    new = cond_in_place(update.num_left_out >= 0, make, room)
    update = optimizer.put(
        update,
        new,
        lambda tree, layer: {**tree, "layers": _written(tree["layers"], layer["layers"], at)},
        is_last=False,
    )
    # Made of the new values at hand, not of the array just written: one read less.
    layer = jax.tree.map(lambda leaf: leaf[0, 0], new.masters["layers"])
    copies = jax.tree.map(lambda leaf: leaf[None, None], optimizer.copies(layer, parts))
    update = update._replace(
        copies={**update.copies, "layers": _written(update.copies["layers"], copies, (row.copied_chunk, i))},
        squares={**update.squares, "layers": jax.tree.map(jnp.add, update.squares["layers"], new.squares)},
    )
    # Zero, and no constant: it depends on the new values, so the sums are read before they are overwritten.
    zero = jnp.minimum(update.num_left_out, 0)
    zeros = jax.tree.map(lambda leaf: jnp.full((1, 1, *leaf.shape[2:]), zero, leaf.dtype), sums)
    return update, _written(sums, zeros, at), new


def _layer_of(tree: PyTree, at: tuple[jax.Array | int, jax.Array | int]) -> PyTree:
    """A tree like the parameters, with the layer at `at` of `tree` alone."""
    return {"shared": {}, "layers": jax.tree.map(lambda leaf: slice_at(leaf, *at), tree["layers"])}


def _written(tree: PyTree, values: PyTree, at: tuple[jax.Array, jax.Array]) -> PyTree:
    return jax.tree.map(lambda leaf, value: with_slice(leaf, value, *at), tree, values)
