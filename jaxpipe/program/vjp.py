"""A layer's vjp, cut in two: the residuals that forward must save, and backward from these residuals.

Parameters, the microbatch and the random state are not residuals: backward gets them again. This file is the
one place that touches the vjp object of `jax.vjp`, whose fields differ between JAX versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp

from jaxpipe.mesh import PyTree
from jaxpipe.program.jaxprs import called, in_stacks, without_calls
from jaxpipe.program.wide_products import with_wide_products


@dataclass(frozen=True, eq=False)
class LayerVjp:
    """Forward and backward of one layer, both from one trace of its `jax.vjp`.

    Two traces may have residuals of one shape in another order, those of the branches of a `cond`, or merge more or
    fewer of them; then backward would read what forward has not saved.
    """

    params: PyTree  # shapes, as those of all arguments
    x: jax.ShapeDtypeStruct
    given: tuple[PyTree, ...]
    y: PyTree  # shapes of the result: an array, or an array and a dict of losses
    traced: core.ClosedJaxpr  # of the leaves of (params, x, given) to those of y, the residuals, and what is not read
    residuals: tuple[jax.ShapeDtypeStruct, ...]  # shapes of the arrays that forward saves
    vjp: Any  # the vjp object, with shapes in place of arrays
    # Of the leaves of (params, residuals, dy, given) to those of the gradients, in the dtypes of their sums where
    # `wide_products` can have them so, and dx; None if they are in the dtypes of their parameters, none of which is
    # read in its stack.
    wide: core.ClosedJaxpr | None = None
    in_stack: frozenset[int] = frozenset()  # leaves of `params` that may be `InStack`

    def forward(self, params: PyTree, x: jax.Array, *given: PyTree) -> tuple[PyTree, list[jax.Array]]:
        """The result of the layer, and its residuals, which backward needs besides `params` and `given`."""
        results = called(self.traced, jax.tree.leaves((params, x, given)))
        structure = jax.tree.structure(self.y)
        # The traced results are y, the residuals, and what of the vjp object is no array.
        y = results[: structure.num_leaves]
        others = results[structure.num_leaves :]
        return jax.tree.unflatten(structure, y), others[: len(self.residuals)]

    def backward(
        self, params: PyTree, residuals: list[jax.Array], dy: PyTree, *given: PyTree
    ) -> tuple[PyTree, jax.Array]:
        """Gradients of `params`, zeros for those that are no floats, and of the input.

        Args:
            dy: the gradient of the layer's result, with its structure.
        """
        if self.wide is not None:
            *d_params, dx = called(self.wide, jax.tree.leaves((params, residuals, dy, given)))
            return jax.tree.unflatten(jax.tree.structure(self.params), d_params), dx
        leaves, structure = _residuals(self.vjp)
        values = iter(residuals)
        # One object serves all layers and actions: a copy is filled, the shapes stay.
        filled = copy.copy(self.vjp)
        filled.opaque_residuals, of_x = jax.tree.unflatten(
            structure, [next(values) if _is_array(leaf) else leaf for leaf in leaves]
        )
        # All arguments, even those that backward does not need.
        filled.args_res = [tuple(jax.tree.leaves(params)), of_x, *(tuple(jax.tree.leaves(value)) for value in given)]
        d_params, dx, *_ = filled(dy)
        # Zeros for float0, the dtype of gradients of integers, with which nothing can be computed.
        float0 = jax.dtypes.float0
        return jax.tree.map(lambda d: jnp.zeros(d.shape) if d.dtype == float0 else d, d_params), dx

    @property
    def backward_jaxpr(self) -> core.ClosedJaxpr:
        """The jaxpr of `backward`: leaves of (params, residuals, dy, given) to those of the gradients, and dx."""
        if self.wide is not None:
            return self.wide

        def backward(params: PyTree, residuals: list[jax.Array], dy: PyTree, given: tuple[PyTree, ...]) -> list:
            d_params, dx = self.backward(params, residuals, dy, *given)
            return [*jax.tree.leaves(d_params), dx]

        return jax.make_jaxpr(backward)(self.params, list(self.residuals), self.y, self.given)


def trace_vjp(layer: Callable, params: PyTree, x: Any, *given: PyTree, wide: bool = False) -> LayerVjp:
    """The vjp of `layer`, (params, x, *given) -> y, for arguments like these arrays or shapes.

    Args:
        layer, params, x, given: the layer and its arguments.
        wide: whether gradients are in the dtypes of their sums where a product makes them.
    """

    def forward(params: PyTree, x: jax.Array, *given: PyTree) -> tuple[PyTree, list[jax.Array], Any]:
        y, vjp = jax.vjp(layer, params, x, *given)
        leaves, _ = _residuals(vjp)
        return y, [leaf for leaf in leaves if _is_array(leaf)], vjp

    # Shapes alone: arrays would be kept as long as this object.
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x, given))
    params, x, given = like
    traced, (y, residuals, vjp) = jax.make_jaxpr(forward, return_shape=True)(params, x, *given)
    whole = LayerVjp(params, x, given, y, traced, tuple(residuals), vjp)
    num_params = len(jax.tree.leaves(params))
    flat = without_calls(traced)
    if in_stack := in_stacks(flat, num_params):
        whole = replace(whole, traced=flat, wide=without_calls(whole.backward_jaxpr), in_stack=in_stack)
    return replace(whole, wide=with_wide_products(whole.backward_jaxpr, num_params)) if wide else whole


def _residuals(vjp: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of the residuals that are not parameters: saved activations, and the input."""
    return jax.tree.flatten((vjp.opaque_residuals, vjp.args_res[1]))


def _is_array(leaf: Any) -> bool:
    """Whether a residual exists: one that backward does not need has no shape."""
    return hasattr(leaf, "shape")
