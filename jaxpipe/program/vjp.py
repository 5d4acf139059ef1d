"""A layer's vjp, cut in two: the residuals that forward must save, and backward from these residuals.

Parameters, the microbatch and the random state are not residuals: backward gets them again. This is the
one place that touches the vjp object of `jax.vjp`, whose fields differ between JAX versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def vjp_forward(layer: Callable, params: PyTree, x: jax.Array, *given: PyTree) -> tuple[jax.Array, list[jax.Array]]:
    """The output of `layer(params, x, *given)`, and its residuals, which backward needs besides `params` and `given`.

    Args:
        layer: (params, x, *given) -> y.
        params: parameters of the layer.
        x: input of the layer.
        given: the microbatch and the random state, which need no gradients.
    """
    y, vjp = jax.vjp(layer, params, x, *given)
    leaves, _ = _residuals(vjp)
    return y, [leaf for leaf in leaves if _is_array(leaf)]


def vjp_backward(
    layer: Callable,
    params: PyTree,
    residuals: list[jax.Array],
    x_like: jax.ShapeDtypeStruct,
    dy: jax.Array,
    *given: PyTree,
) -> tuple[PyTree, jax.Array]:
    """Gradients of `params` and `x`.

    Args:
        layer: (params, x, *given) -> y.
        params: parameters of the layer, as in forward.
        residuals: residuals from `vjp_forward`.
        x_like: shape and dtype of the layer's input.
        dy: the gradient of the layer's output.
        given: the same as in forward.
    """
    # eval_shape traces the vjp object without computing anything; then the saved values take the place of its shapes.
    _, vjp = jax.eval_shape(lambda *arguments: jax.vjp(layer, *arguments), params, x_like, *given)
    leaves, structure = _residuals(vjp)
    values = iter(residuals)
    filled = copy.copy(vjp)
    filled.opaque_residuals, of_x = jax.tree.unflatten(
        structure, [next(values) if _is_array(leaf) else leaf for leaf in leaves]
    )
    # All arguments, even those that backward does not need.
    filled.args_res = [tuple(jax.tree.leaves(params)), of_x, *(tuple(jax.tree.leaves(value)) for value in given)]
    d_params, dx, *_ = filled(dy)
    return d_params, dx


def _residuals(vjp: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of the residuals that are not parameters: saved activations, and the input."""
    return jax.tree.flatten((vjp.opaque_residuals, vjp.args_res[1]))


def _is_array(leaf: Any) -> bool:
    """Whether a residual exists: one that backward does not need has no shape."""
    return hasattr(leaf, "shape")
