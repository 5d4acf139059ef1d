"""A layer's vjp, cut in two: the residuals that forward must save, and backward from these residuals.

Parameters, the microbatch and the random state are not residuals: backward gets them again. This file is the
one place that touches the vjp object of `jax.vjp`, whose fields differ between JAX versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
import optax

from jaxpipe.mesh import PyTree
from jaxpipe.program.jaxprs import called, in_stacks, without_calls
from jaxpipe.program.side_by_side import Phases
from jaxpipe.program.wide_products import with_wide_products


@dataclass(frozen=True, eq=False)
class LayerVjp:
    """Forward and backward of one layer, both from one trace of its `jax.vjp`.

    Two traces may have residuals of one shape in another order, those of the branches of a `cond`, or merge more or
    fewer of them; then backward would read what forward has not saved.
    """

    params: PyTree  # shapes, as those of all arguments
    is_trained: tuple[bool, ...]  # [leaf of `params`] False: it is frozen, and has no gradient
    x: jax.ShapeDtypeStruct
    given: tuple[PyTree, ...]
    y: PyTree  # shapes of the result: an array, or an array and a dict of losses
    traced: core.ClosedJaxpr  # of the leaves of (params, x, given) to those of y, the residuals, and what is not read
    residuals: tuple[jax.ShapeDtypeStruct, ...]  # shapes of the arrays that forward saves
    vjp: Any  # the vjp object, with shapes in place of arrays
    # [array of the vjp object that is no argument of it] the frozen leaf of `params` that it is; None: a residual.
    sources: tuple[int | None, ...]
    # Of the leaves of (params, residuals, dy, given) to those of the gradients, in the dtypes of their sums where
    # `wide_products` can have them so, and dx; None if they are in the dtypes of their parameters, none of which is
    # read in its stack.
    wide: core.ClosedJaxpr | None = None
    in_stack: frozenset[int] = frozenset()  # leaves of `params` that may be `InStack`

    def forward(self, params: PyTree, x: jax.Array, *given: PyTree) -> tuple[PyTree, list[jax.Array]]:
        """The result of the layer, and its residuals, which backward needs besides `params` and `given`."""
        return self.results_of_forward(called(self.traced, jax.tree.leaves((params, x, given))))

    def results_of_forward(self, results: list[Any]) -> tuple[PyTree, list[jax.Array]]:
        """The result of the layer, and its residuals, from what `traced` returns."""
        structure = jax.tree.structure(self.y)
        # The traced results are y, the arrays of the vjp object, and what of it is no array.
        y = results[: structure.num_leaves]
        others = results[structure.num_leaves : structure.num_leaves + len(self.sources)]
        return jax.tree.unflatten(structure, y), [
            other for other, source in zip(others, self.sources, strict=True) if source is None
        ]

    def backward(
        self, params: PyTree, residuals: list[jax.Array], dy: PyTree, *given: PyTree
    ) -> tuple[PyTree, jax.Array]:
        """Gradients of `params` without frozen ones, zeros for those that are no floats, and of the input.

        Args:
            dy: the gradient of the layer's result, with its structure.
        """
        if self.wide is not None:
            return self.results_of_backward(called(self.wide, jax.tree.leaves((params, residuals, dy, given))))
        leaves, structure = _residuals(self.vjp)
        of_params = jax.tree.leaves(params)
        saved = iter(residuals)
        values = iter([next(saved) if source is None else of_params[source] for source in self.sources])
        # One object serves all layers and actions: a copy is filled, the shapes stay.
        filled = copy.copy(self.vjp)
        filled.opaque_residuals, of_x = jax.tree.unflatten(
            structure, [next(values) if _is_array(leaf) else leaf for leaf in leaves]
        )
        # All arguments, even those that backward does not need.
        trained = tuple(leaf for leaf, wanted in zip(of_params, self.is_trained, strict=True) if wanted)
        filled.args_res = [trained, of_x, *(tuple(jax.tree.leaves(value)) for value in given)]
        d_params, dx, *_ = filled(dy)
        # Zeros for float0, the dtype of gradients of integers, with which nothing can be computed.
        float0 = jax.dtypes.float0
        return self._like_params([jnp.zeros(d.shape) if d.dtype == float0 else d for d in d_params]), dx

    def results_of_backward(self, results: list[Any]) -> tuple[PyTree, jax.Array]:
        """Gradients of `params` and of the input, from what `backward_jaxpr` returns."""
        *d_params, dx = results
        return self._like_params(d_params), dx

    @cached_property
    def forward_phases(self) -> Phases:
        """The phases of `forward`, which takes the leaves of (params, x, given)."""
        closed = without_calls(self.traced)
        place = len(jax.tree.leaves(self.params))
        return Phases.of(closed, closed.jaxpr.invars[place : place + 1], waited=closed.jaxpr.outvars)

    @cached_property
    def backward_phases(self) -> Phases:
        """The phases of `backward`, which takes the leaves of (params, residuals, dy, given)."""
        closed = without_calls(self.backward_jaxpr)
        place = len(jax.tree.leaves(self.params)) + len(self.residuals)
        of_result = closed.jaxpr.invars[place : place + jax.tree.structure(self.y).num_leaves]
        return Phases.of(closed, of_result, waited=closed.jaxpr.outvars[-1:])

    def _like_params(self, d_params: Sequence[jax.Array]) -> PyTree:
        gradients = iter(d_params)
        leaves = [next(gradients) if wanted else optax.MaskedNode() for wanted in self.is_trained]
        return jax.tree.structure(self.params).unflatten(leaves)

    @property
    def backward_jaxpr(self) -> core.ClosedJaxpr:
        """The jaxpr of `backward`: leaves of (params, residuals, dy, given) to those of the gradients, and dx."""
        if self.wide is not None:
            return self.wide

        def backward(params: PyTree, residuals: list[jax.Array], dy: PyTree, given: tuple[PyTree, ...]) -> list:
            d_params, dx = self.backward(params, residuals, dy, *given)
            return [*jax.tree.leaves(d_params), dx]

        return jax.make_jaxpr(backward)(self.params, list(self.residuals), self.y, self.given)


def trace_vjp(
    layer: Callable,
    params: PyTree,
    x: Any,
    *given: PyTree,
    is_trained: Sequence[bool] | None = None,
    wide: bool = False,
) -> LayerVjp:
    """The vjp of `layer`, (params, x, *given) -> y, for arguments like these arrays or shapes.

    Args:
        layer, params, x, given: the layer and its arguments.
        is_trained: [leaf of `params`] whether it has a gradient; None: all have.
        wide: whether gradients are in the dtypes of their sums where a product makes them.
    """
    structure = jax.tree.structure(params)
    is_trained = tuple(is_trained or [True] * structure.num_leaves)

    def forward(params: PyTree, x: jax.Array, *given: PyTree) -> tuple[PyTree, list[jax.Array], Any]:
        leaves = jax.tree.leaves(params)

        # Frozen leaves come from around the differentiated function, so that nothing is saved for gradients of theirs.
        def of_trained(trained: list[jax.Array], x: jax.Array, *given: PyTree) -> PyTree:
            values = iter(trained)
            merged = [next(values) if wanted else leaf for leaf, wanted in zip(leaves, is_trained, strict=True)]
            return layer(structure.unflatten(merged), x, *given)

        trained = [leaf for leaf, wanted in zip(leaves, is_trained, strict=True) if wanted]
        y, vjp = jax.vjp(of_trained, trained, x, *given)
        leaves, _ = _residuals(vjp)
        return y, [leaf for leaf in leaves if _is_array(leaf)], vjp

    # Shapes alone: arrays would be kept as long as this object.
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x, given))
    params, x, given = like
    traced, (y, arrays, vjp) = jax.make_jaxpr(forward, return_shape=True)(params, x, *given)
    # A frozen leaf that backward reads is among the arrays, as the very input of the trace.
    num_results = len(jax.tree.leaves(y))
    places = {v: i for i, v in enumerate(traced.jaxpr.invars[: structure.num_leaves])}
    outs = traced.jaxpr.outvars[num_results : num_results + len(arrays)]
    sources = tuple(places.get(v) if isinstance(v, core.Var) else None for v in outs)
    residuals = tuple(like for like, source in zip(arrays, sources, strict=True) if source is None)
    whole = LayerVjp(params, is_trained, x, given, y, traced, residuals, vjp, sources)
    flat = without_calls(traced)
    if in_stack := in_stacks(flat, structure.num_leaves):
        whole = replace(whole, traced=flat, wide=without_calls(whole.backward_jaxpr), in_stack=in_stack)
    return replace(whole, wide=with_wide_products(whole.backward_jaxpr, sum(is_trained))) if wide else whole


def _residuals(vjp: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of the residuals that are not parameters: saved activations, and the input."""
    return jax.tree.flatten((vjp.opaque_residuals, vjp.args_res[1]))


def _is_array(leaf: Any) -> bool:
    """Whether a residual exists: one that backward does not need has no shape."""
    return hasattr(leaf, "shape")
