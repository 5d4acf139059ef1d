"""A layer's vjp, cut in two: what forward must keep, and backward from what was kept.

Parameters, the microbatch and what random numbers come from are no residuals: backward gets them anew. This is the
one place that touches the vjp object of `jax.vjp`, whose fields differ between jax versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def forward(layer: Callable, params: PyTree, x: jax.Array, *given: PyTree) -> tuple[jax.Array, list[jax.Array]]:
    """`layer(params, x, *given)` and the arrays that its backward needs besides `params` and `given`.

    Args:
        given: the microbatch and what random numbers come from: nothing that needs a gradient.
    """
    y, vjp = jax.vjp(layer, params, x, *given)
    leaves, _ = _kept(vjp)
    return y, [leaf for leaf in leaves if _is_array(leaf)]


def backward(
    layer: Callable,
    params: PyTree,
    residuals: list[jax.Array],
    x_like: jax.ShapeDtypeStruct,
    dy: jax.Array,
    *given: PyTree,
) -> tuple[PyTree, jax.Array]:
    """Gradients for `params` and `x`.

    Args:
        residuals: what `forward` kept.
        x_like: shape and dtype of the layer's input.
        dy: the gradient of the layer's output.
        given: what `forward` was given.
    """
    # eval_shape traces the vjp object without computing anything; it is filled with what was kept.
    _, vjp = jax.eval_shape(lambda *arguments: jax.vjp(layer, *arguments), params, x_like, *given)
    leaves, structure = _kept(vjp)
    values = iter(residuals)
    filled = copy.copy(vjp)
    filled.opaque_residuals, of_x = jax.tree.unflatten(
        structure, [next(values) if _is_array(leaf) else leaf for leaf in leaves]
    )
    # Also those that it does not need.
    filled.args_res = [tuple(jax.tree.leaves(params)), of_x, *(tuple(jax.tree.leaves(value)) for value in given)]
    d_params, dx, *_ = filled(dy)
    return d_params, dx


def _kept(vjp: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of the residuals that are no parameters: saved activations, and the input."""
    return jax.tree.flatten((vjp.opaque_residuals, vjp.args_res[1]))


def _is_array(leaf: Any) -> bool:
    """Whether a residual is there at all: one that backward does not need has no shape."""
    return hasattr(leaf, "shape")
