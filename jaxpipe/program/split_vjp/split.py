"""The split backward of a layer: I, the gradient of its input, now; W, those of its parameters' products, later.

First the backward's jaxpr is made flat, so that each equation is wanted now or not: no calls, and no scan that is
wanted in part. Such a scan becomes two: one that runs now, and one that runs later over the values that the first saved
in each turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend.core as core

from jaxpipe.mesh import PyTree
from jaxpipe.program.jaxprs import (
    InStack,
    Values,
    evaluate,
    num_consts_and_carry,
    read,
    run,
    store,
    traced_as,
    without_calls,
)
from jaxpipe.program.split_vjp.cut import Cut, cut, needed_inputs
from jaxpipe.program.vjp import LayerVjp

NARROW = 8  # times as many parameters has a layer as are trained in it, where these are adapters


def without_mixed_scans(closed: core.ClosedJaxpr, is_wanted: Sequence[bool]) -> core.ClosedJaxpr:
    """Returns `closed` with each scan cut in two if only some of its results lead to wanted outputs.

    Args:
        closed: a jaxpr without calls.
    """
    jaxpr = closed.jaxpr
    wanted = {v for v, w in zip(jaxpr.outvars, is_wanted, strict=True) if w and isinstance(v, core.Var)}
    split: dict[int, _SplitScan] = {}
    for i, equation in reversed(list(enumerate(jaxpr.eqns))):
        is_needed = [out in wanted for out in equation.outvars]
        if not any(is_needed):
            continue
        operands = equation.invars
        if equation.primitive.name == "scan":
            halves = _split_scan(equation, is_needed)
            operands = [v for v, used in zip(operands, halves.reads, strict=True) if used]
            if not all(halves.cut.is_early):
                split[i] = halves
        wanted.update(v for v in operands if isinstance(v, core.Var))
    if not split:
        return closed

    def by_two_scans(*arguments: Any) -> list[Any]:
        values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
        for i, equation in enumerate(jaxpr.eqns):
            if i in split:
                store(values, equation, split[i].run(read(values, equation.invars)))
            else:
                run(values, equation)
        return read(values, jaxpr.outvars)

    return traced_as(closed, by_two_scans)


@dataclass(frozen=True)
class _SplitScan:
    """A scan, cut in two."""

    equation: core.JaxprEqn
    body: core.ClosedJaxpr  # the scanned body, without calls and mixed scans
    cut: Cut
    reads: list[bool]  # [input of the scan] whether a wanted output depends on it

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """The results of the scan, by two scans."""
        jaxpr = self.body.jaxpr
        params = self.equation.params
        num_consts, num_carry = num_consts_and_carry(params)
        invars = jaxpr.invars
        outvars = jaxpr.outvars
        early = self.cut.is_early
        # Not strict: `arguments` goes on with the carry and the scanned values, which the lines below take.
        consts = dict(zip([*jaxpr.constvars, *invars[:num_consts]], [*self.body.consts, *arguments], strict=False))
        carry_in = invars[num_consts : num_consts + num_carry]
        xs_in = invars[num_consts + num_carry :]
        init = dict(zip(carry_in, arguments[num_consts:], strict=False))
        xs = dict(zip(xs_in, arguments[num_consts + num_carry :], strict=True))
        results: list[Any] = [None] * len(outvars)

        def scan(equations: list[core.JaxprEqn], is_now: bool, given: Values, kept: list[core.Var]) -> Values:
            outs = [k for k in range(len(outvars)) if early[k] == is_now]
            carried = [k for k in outs if k < num_carry]
            stacked = [k for k in outs if k >= num_carry]

            def body(carry: list[Any], of_turn: list[Any]) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
                values = {**consts, **dict(zip(given, of_turn, strict=True))}
                values.update(zip([carry_in[k] for k in carried], carry, strict=True))
                outputs = evaluate(equations, values, [*[outvars[k] for k in (*carried, *stacked)], *kept])
                num_carried = len(carried)
                num_outs = len(outs)
                return outputs[:num_carried], (outputs[num_carried:num_outs], outputs[num_outs:])

            first = [init[carry_in[k]] for k in carried]
            turns = {name: params[name] for name in ("length", "reverse", "unroll")}
            last, (ys, saved) = jax.lax.scan(body, first, list(given.values()), **turns)
            for k, value in zip([*carried, *stacked], [*last, *ys], strict=True):
                results[k] = value
            return dict(zip(kept, saved, strict=True))

        # Only what is read is scanned: the others would be sliced in every turn.
        read_now = {v for equation in self.cut.now for v in equation.invars if isinstance(v, core.Var)}
        read_now |= {v for v, e in zip(outvars, early, strict=True) if e and isinstance(v, core.Var)}
        kept = [v for v in self.cut.saved if v not in xs]
        saved = scan(self.cut.now, True, {v: x for v, x in xs.items() if v in read_now}, kept)
        scan(self.cut.later, False, saved | {v: xs[v] for v in self.cut.saved if v in xs}, [])
        return results


def _split_scan(equation: core.JaxprEqn, is_needed: Sequence[bool]) -> _SplitScan:
    """The scan of `equation` cut in two; the second is empty if nothing can be deferred."""
    params = equation.params
    num_consts, num_carry = num_consts_and_carry(params)
    body = without_calls(params["jaxpr"])
    is_wanted = list(is_needed)
    # The turn before must compute the carry that a turn reads: is_wanted grows until it is closed under that.
    while True:
        reads = needed_inputs(body.jaxpr, is_wanted)
        missing = [k for k in range(num_carry) if reads[num_consts + k] and not is_wanted[k]]
        if not missing:
            break
        for k in missing:
            is_wanted[k] = True
    body = without_mixed_scans(body, is_wanted)
    invars = body.jaxpr.invars
    deferred = set()
    # A carry deferred in one turn is deferred in the next: deferred inputs grow until no carry is added.
    while True:
        halves = cut(body.jaxpr, is_wanted, given=invars[:num_consts], deferred=deferred)
        late = {invars[num_consts + k] for k in range(num_carry) if not halves.is_early[k]}
        if late <= deferred:
            return _SplitScan(equation, body, halves, reads)
        deferred |= late


@dataclass(frozen=True)
class SplitBackward:
    """I and W of one layer; together they do what B does, each product once.

    I computes the gradient of the input, and those of parameters that need no product (biases, norms). It defers
    the products for the kernels to W, with what they read: the gradients of the products' outputs.
    W also reads residuals, from which it computes the products' inputs, and what of the gradients is elementwise.

    Attributes:
        backward: jaxpr of B without calls: leaves of params, residuals, dy and given in sequence, to the gradients of
            trained leaves of params, and dx. Here `given` begins with the factors of the layer's losses, if it has any.
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
    def is_of_w(self) -> list[bool]:
        """[trained leaf of params] whether W makes its gradient."""
        return [not is_early for is_early in self.cut.is_early[:-1]]

    @property
    def is_read_by_w(self) -> list[bool]:
        """[leaf of params] whether W reads it."""
        read_there = {v for equation in self.cut.later for v in equation.invars if isinstance(v, core.Var)}
        return [v in read_there for v in self.backward.jaxpr.invars[: self.num_params]]

    @property
    def deferred(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of each array that I defers to W."""
        return tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._deferred)  # pyright: ignore

    def input_gradient(
        self, params: PyTree, residuals: Sequence[jax.Array], dy: jax.Array, *given: PyTree
    ) -> tuple[jax.Array, list[jax.Array | None], list[jax.Array]]:
        """Computes I.

        Returns:
            dx; the gradient of each trained leaf of `params`, None for those of W; the arrays deferred to W.
        """
        early = self.cut.is_early
        values = self._values(params, dict(zip(self._residuals, residuals, strict=True)), given)
        values[self.backward.jaxpr.invars[self.num_params + self.num_residuals]] = dy
        wanted = [out for out, is_early in zip(self.backward.jaxpr.outvars, early, strict=True) if is_early]
        results = iter(evaluate(self.cut.now, values, [*wanted, *self._deferred]))
        *grads, dx = [next(results) if is_early else None for is_early in early]
        return dx, grads, list(results)  # pyright: ignore[reportReturnType]

    def weight_gradient(
        self, params: PyTree, residuals: Sequence[jax.Array], deferred: Sequence[jax.Array], *given: PyTree
    ) -> list[jax.Array | None]:
        """Computes W.

        Args:
            residuals: the residuals with the indices `self.shared_with_w`.

        Returns:
            The gradient of each trained leaf of `params`, None for those of I.
        """
        early = self.cut.is_early
        shared = [self._residuals[i] for i in self.shared_with_w]
        values = self._values(params, dict(zip(shared, residuals, strict=True)), given)
        values.update(zip(self._deferred, deferred, strict=True))
        wanted = [out for out, is_early in zip(self.backward.jaxpr.outvars, early, strict=True) if not is_early]
        in_place = any(isinstance(leaf, InStack) for leaf in jax.tree.leaves(params))
        results = iter(evaluate(self.cut.later, values, wanted, may_add=in_place))
        # All but the last, which is dx.
        return [None if is_early else next(results) for is_early in early[:-1]]

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

    Any layer has one; where few parameters are trained beside frozen ones, I is all of it. Only products can be
    deferred: those of kernels, in the layer itself, in functions that it calls or recomputes, and in its scans; a
    `while` or `cond` of which dx needs any result is computed by I as a whole.
    """
    closed = without_calls(vjp.backward_jaxpr)
    num_params = len(jax.tree.leaves(vjp.params))
    num_residuals = len(vjp.residuals)
    sizes = [leaf.size for leaf in jax.tree.leaves(vjp.params)]
    of_trained = [size for size, is_trained in zip(sizes, vjp.is_trained, strict=True) if is_trained]
    # Of adapters I makes all gradients, and W has nothing to do: their products are narrow, and to move for later what
    # they read takes as long as they do.
    is_now = len(of_trained) < len(sizes) and NARROW * sum(of_trained) <= sum(sizes)
    is_wanted = [is_now] * len(of_trained) + [True]  # dx
    closed = without_mixed_scans(closed, is_wanted)
    invars = closed.jaxpr.invars
    # Inputs stand as params, residuals, dy and given, each flat.
    of_dy = num_params + num_residuals
    halves = cut(
        closed.jaxpr,
        is_wanted,
        params=invars[:num_params],
        given=invars[of_dy + 1 :],
        gradients=invars[of_dy : of_dy + 1],
        stored=invars[num_params:of_dy],
    )
    return SplitBackward(closed, halves, num_params, num_residuals)
