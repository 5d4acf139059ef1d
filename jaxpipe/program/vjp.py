"""A layer's vjp, cut in two: the residuals that forward must save, and backward from what was saved.

Parameters, the microbatch and what random numbers come from are no residuals: backward is given them again. This is the
one place that touches the vjp object of `jax.vjp`, whose fields differ between JAX versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def vjp_forward(layer: Callable, params: PyTree, x: jax.Array, *given: PyTree) -> tuple[jax.Array, list[jax.Array]]:
    """The output of `layer(params, x, *given)`, and its residuals: what backward needs besides `params` and `given`.

    Args:
        layer: (params, x, *given) -> y.
        params: of the layer.
        x: its input.
        given: the microbatch and what random numbers come from: nothing that needs a gradient.
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
    """Gradients for `params` and `x`.

    Args:
        layer: (params, x, *given) -> y.
        params: of the layer, as forward had them.
        residuals: what `vjp_forward` returned.
        x_like: shape and dtype of the layer's input.
        dy: the gradient of the layer's output.
        given: as forward had them.
    """
    # eval_shape traces the vjp object without computing anything; then the saved values take the place of its shapes.
    _, vjp = jax.eval_shape(lambda *arguments: jax.vjp(layer, *arguments), params, x_like, *given)
    leaves, structure = _residuals(vjp)
    values = iter(residuals)
    filled = copy.copy(vjp)
    filled.opaque_residuals, of_x = jax.tree.unflatten(
        structure, [next(values) if _is_array(leaf) else leaf for leaf in leaves]
    )
    # All arguments, also those that backward does not need.
    filled.args_res = [tuple(jax.tree.leaves(params)), of_x, *(tuple(jax.tree.leaves(value)) for value in given)]
    d_params, dx, *_ = filled(dy)
    return d_params, dx


def _residuals(vjp: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of the residuals that are no parameters: saved activations, and the input."""
    return jax.tree.flatten((vjp.opaque_residuals, vjp.args_res[1]))


def _is_array(leaf: Any) -> bool:
    """Whether a residual is there at all: one that backward does not need has no shape."""
    return hasattr(leaf, "shape")
