"""The backward of a layer in two halves: the gradient of its input now, those of its parameters' products later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as core

from jaxpipe.program import residuals
from jaxpipe.program.halves.cut import Cut, cut
from jaxpipe.program.halves.flat import evaluate, without_calls, without_mixed_scans

PyTree = Any


@dataclass(frozen=True)
class Halves:
    """I and W of one layer; together they do what B does, each operation once.

    I computes the gradient of the input, and those of parameters that come without a product (biases, norms). It leaves
    what W needs of its results, the gradients of the products' outputs; W needs some residuals too, the products'
    inputs, and computes the gradients of the kernels.

    Attributes:
        backward: what B computes, without calls: of params, residuals, dy and given, their leaves one after the other,
            the leaves of the params' gradients and dx.
        cut: of `backward`.
        num_params: leaves.
        num_residuals: arrays that forward kept.
    """

    backward: core.ClosedJaxpr
    cut: Cut
    num_params: int
    num_residuals: int

    @cached_property
    def for_weights(self) -> tuple[int, ...]:
        """Indices of the residuals that W reads; I may read them too."""
        return tuple(i for i, v in enumerate(self._residuals) if v in self.cut.saved)

    @cached_property
    def _left(self) -> list[core.Var]:
        return [v for v in self.cut.saved if v not in self._residuals]

    @property
    def left(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each array that I leaves for W."""
        return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._left)  # pyright: ignore

    def input_gradient(
        self, params: PyTree, kept: Sequence[jax.Array], dy: jax.Array, *given: PyTree
    ) -> tuple[jax.Array, list[jax.Array | None], list[jax.Array]]:
        """I.

        Args:
            kept: all residuals.
            given: what forward was given.

        Returns:
            dx; the gradient of each leaf of `params`, None where it is W's; what W needs.
        """
        early = self.cut.is_early
        values = self._values(params, dict(zip(self._residuals, kept, strict=True)), given)
        values[self.backward.jaxpr.invars[self.num_params + self.num_residuals]] = dy
        wanted = [out for out, is_early in zip(self.backward.jaxpr.outvars, early, strict=True) if is_early]
        found = iter(evaluate(self.cut.now, values, [*wanted, *self._left]))
        *grads, dx = [next(found) if is_early else None for is_early in early]
        return dx, grads, list(found)  # pyright: ignore[reportReturnType]

    def weight_gradient(
        self, params: PyTree, kept: Sequence[jax.Array], left: Sequence[jax.Array], *given: PyTree
    ) -> list[jax.Array | None]:
        """W: the gradient of each leaf of `params`, None where it is I's.

        Args:
            kept: the residuals `self.for_weights`.
            left: what I has left.
            given: what forward was given.
        """
        early = self.cut.is_early
        of_kept = [self._residuals[i] for i in self.for_weights]
        values = self._values(params, dict(zip(of_kept, kept, strict=True)), given)
        values.update(zip(self._left, left, strict=True))
        wanted = [out for out, is_early in zip(self.backward.jaxpr.outvars, early, strict=True) if not is_early]
        found = iter(evaluate(self.cut.later, values, wanted))
        return [None if is_early else next(found) for is_early in early[:-1]]

    @property
    def _residuals(self) -> list[core.Var]:
        return self.backward.jaxpr.invars[self.num_params : self.num_params + self.num_residuals]

    def _values(self, params: PyTree, kept: dict[core.Var, jax.Array], given: tuple[PyTree, ...]) -> dict:
        invars = self.backward.jaxpr.invars
        values = dict(zip(self.backward.jaxpr.constvars, self.backward.consts, strict=True)) | kept
        values.update(zip(invars[: self.num_params], jax.tree.leaves(params), strict=True))
        values.update(zip(invars[self.num_params + self.num_residuals + 1 :], jax.tree.leaves(given), strict=True))
        return values


def halve(layer: Callable, params: PyTree, kept: Sequence[Any], x_like: jax.ShapeDtypeStruct, *given: PyTree) -> Halves:
    """The halves of `residuals.backward` of `layer`, for arguments of these shapes and dtypes.

    Any layer has them. What can be put off are products: of kernels, in the layer itself, in what it calls or
    recomputes, and in its scans; a `while` or `cond` of which anything is needed for dx is done now as a whole.

    Args:
        kept: the residuals.
        x_like: input and output of the layer.
        given: the microbatch and what random numbers come from.
    """

    def backward(params: PyTree, kept: list[jax.Array], dy: jax.Array, given: tuple[PyTree, ...]) -> list[jax.Array]:
        d_params, dx = residuals.backward(layer, params, kept, x_like, dy, *given)
        return [*jax.tree.leaves(d_params), dx]

    closed = without_calls(jax.make_jaxpr(backward)(params, list(kept), x_like, given))
    num_params = len(jax.tree.leaves(params))
    is_wanted = [False] * num_params + [True]
    closed = without_mixed_scans(closed, is_wanted)
    invars, behind = closed.jaxpr.invars, num_params + len(kept)
    found = cut(
        closed.jaxpr,
        is_wanted,
        params=invars[:num_params],
        given=invars[behind + 1 :],
        gradients=invars[behind : behind + 1],
    )
    return Halves(closed, found, num_params, len(kept))
