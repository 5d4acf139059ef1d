"""The split backward of a layer: I, the gradient of its input, now; W, those of its parameters' products, later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as core

from jaxpipe.program.split_vjp.cut import Cut, cut
from jaxpipe.program.split_vjp.flat import evaluate, without_calls, without_mixed_scans
from jaxpipe.program.vjp import LayerVjp

PyTree = Any


@dataclass(frozen=True)
class SplitBackward:
    """I and W of one layer; together they do what B does, each operation once.

    I computes the gradient of the input, and those of parameters that need no product (biases, norms). It defers
    the products for the kernels to W, with the results that they read: the gradients of the products' outputs.
    W also reads some residuals: the products' inputs.

    Attributes:
        backward: jaxpr of B without calls: leaves of params, residuals, dy and given in sequence,
            to the leaves of the params' gradients and dx.
        cut: the cut of `backward`.
        num_params: number of leaves of the params.
        num_residuals: number of arrays that F saved.

    Example:
        Of `x @ kernel + bias`, I computes dx and the gradient of the bias, and defers dy; W needs dy and x, the only
        residual.

        >>> import jax.numpy as jnp
        >>> from jaxpipe.program.vjp import trace_vjp
        >>> params = {"bias": jnp.ones(3), "kernel": jnp.ones((3, 3))}
        >>> x = jax.ShapeDtypeStruct((2, 3), "float32")
        >>> split = split_vjp(trace_vjp(lambda p, x: x @ p["kernel"] + p["bias"], params, x))
        >>> [like.shape for like in split.deferred], split.shared_with_w
        ([(2, 3)], (0,))
        >>> _, grads, _ = split.input_gradient(params, [jnp.ones((2, 3))], jnp.ones((2, 3)))
        >>> [grad is None for grad in grads]  # bias, kernel
        [False, True]
    """

    backward: core.ClosedJaxpr
    cut: Cut
    num_params: int
    num_residuals: int

    @cached_property
    def shared_with_w(self) -> tuple[int, ...]:
        """Indices of the residuals that W reads; I may read them too."""
        return tuple(i for i, v in enumerate(self._residuals) if v in self.cut.saved)

    @cached_property
    def _deferred(self) -> list[core.Var]:
        return [v for v in self.cut.saved if v not in self._residuals]

    @property
    def deferred(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each array that I defers to W."""
        return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._deferred)  # pyright: ignore

    def input_gradient(
        self, params: PyTree, residuals: Sequence[jax.Array], dy: jax.Array, *given: PyTree
    ) -> tuple[jax.Array, list[jax.Array | None], list[jax.Array]]:
        """Computes I.

        Args:
            params: parameters of the layer.
            residuals: all residuals of the layer.
            dy: the gradient of the layer's output.
            given: the arguments of forward besides `params` and x.

        Returns:
            dx; the gradient of each leaf of `params`, None for those of W; the arrays deferred to W.
        """
        early = self.cut.is_early
        values = self._values(params, dict(zip(self._residuals, residuals, strict=True)), given)
        values[self.backward.jaxpr.invars[self.num_params + self.num_residuals]] = dy
        wanted = [out for out, is_early in zip(self.backward.jaxpr.outvars, early, strict=True) if is_early]
        found = iter(evaluate(self.cut.now, values, [*wanted, *self._deferred]))
        *grads, dx = [next(found) if is_early else None for is_early in early]
        return dx, grads, list(found)  # pyright: ignore[reportReturnType]

    def weight_gradient(
        self, params: PyTree, residuals: Sequence[jax.Array], deferred: Sequence[jax.Array], *given: PyTree
    ) -> list[jax.Array | None]:
        """Computes W.

        Args:
            params: parameters of the layer.
            residuals: the residuals with the indices `self.shared_with_w`.
            deferred: the arrays that I has deferred.
            given: the arguments of forward besides `params` and x.

        Returns:
            The gradient of each leaf of `params`, None for those of I.
        """
        early = self.cut.is_early
        shared = [self._residuals[i] for i in self.shared_with_w]
        values = self._values(params, dict(zip(shared, residuals, strict=True)), given)
        values.update(zip(self._deferred, deferred, strict=True))
        wanted = [out for out, is_early in zip(self.backward.jaxpr.outvars, early, strict=True) if not is_early]
        found = iter(evaluate(self.cut.later, values, wanted))
        return [None if is_early else next(found) for is_early in early[:-1]]

    @property
    def _residuals(self) -> list[core.Var]:
        return self.backward.jaxpr.invars[self.num_params : self.num_params + self.num_residuals]

    def _values(self, params: PyTree, residuals: dict[core.Var, jax.Array], given: tuple[PyTree, ...]) -> dict:
        invars = self.backward.jaxpr.invars
        values = dict(zip(self.backward.jaxpr.constvars, self.backward.consts, strict=True)) | residuals
        values.update(zip(invars[: self.num_params], jax.tree.leaves(params), strict=True))
        values.update(zip(invars[self.num_params + self.num_residuals + 1 :], jax.tree.leaves(given), strict=True))
        return values


def split_vjp(vjp: LayerVjp) -> SplitBackward:
    """The split backward of a layer.

    Any layer has one. Only products can be deferred: those of kernels, in the layer itself, in functions that it calls
    or recomputes, and in its scans; a `while` or `cond` of which dx needs any result is computed by I as a whole.

    Args:
        vjp: the layer's whole vjp.
    """

    def backward(params: PyTree, residuals: list[jax.Array], dy: jax.Array, given: tuple[PyTree, ...]) -> list:
        d_params, dx = vjp.backward(params, residuals, dy, *given)
        return [*jax.tree.leaves(d_params), dx]

    closed = without_calls(jax.make_jaxpr(backward)(vjp.params, list(vjp.residuals), vjp.x, vjp.given))
    num_params, num_residuals = len(jax.tree.leaves(vjp.params)), len(vjp.residuals)
    is_wanted = [False] * num_params + [True]  # dx alone
    closed = without_mixed_scans(closed, is_wanted)
    invars, of_dy = closed.jaxpr.invars, num_params + num_residuals
    found = cut(
        closed.jaxpr,
        is_wanted,
        params=invars[:num_params],
        given=invars[of_dy + 1 :],
        gradients=invars[of_dy : of_dy + 1],
    )
    return SplitBackward(closed, found, num_params, num_residuals)
