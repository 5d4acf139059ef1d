"""Running sums over microbatches: what actions add to the losses and to the gradients of layers."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from jaxpipe.mesh import PyTree
from jaxpipe.program.jaxprs import Summand
from jaxpipe.program.stacked import Index, with_added


def add_scaled(totals: PyTree, scale: PyTree, values: PyTree) -> PyTree:
    """Returns sums of losses with those of one microbatch added, each times its factor."""
    return jax.tree.map(lambda total, scale, value: total + scale * value, totals, scale, values)


def add_of_layer(totals: PyTree, layer: jax.Array, scale: PyTree, values: PyTree) -> PyTree:
    """The same with the losses of one layer; an array is added at the layer's index in the model."""

    def add(total: jax.Array, scale: jax.Array, value: jax.Array) -> jax.Array:
        if not value.ndim:
            return total + scale * value
        return lax.dynamic_update_index_in_dim(total, total[layer] + scale * value, layer, 0)

    return jax.tree.map(add, totals, scale, values)


def add_layer(
    totals: PyTree, places: Sequence[tuple[Index, Index]], grads: Sequence[jax.Array | Summand | None]
) -> PyTree:
    """Returns running sums of layers with the gradients of one layer added.

    Args:
        totals: running sums, leaves [chunk, layer, ...].
        places: [leaf] chunk and row.
        grads: [leaf] gradients of the layer; None adds nothing.
    """
    # I leaves the gradients of products to W, and W finds those of biases and norms done: None in either.
    leaves, structure = jax.tree.flatten(totals)

    def added(total: jax.Array, place: tuple[Index, Index], d: jax.Array | Summand | None) -> jax.Array:
        if isinstance(d, Summand):
            return d.added_to(total, *place)
        return total if d is None else with_added(total, d, *place)

    return jax.tree.unflatten(structure, map(added, leaves, places, grads))
