"""Gradients of kernels in the dtype of their sums, from the product itself.

The gradient of a kernel is a product, rounded to the compute dtype, and is then added to a sum in float32. Products are
made in float32 anyway: one that returns it is not rounded, and XLA lets cuBLAS add it to the sum in one kernel (beta =
1), where the sum stands at an index that the host knows: that of the loop over layers.

| LLaMA-3 8B, a layer and microbatch of 8,192 tokens, H100 | product | addition to the sum |
|---|---|---|
| rounded | writes 416 MiB | reads 1,248 MiB, writes 832 |
| in the sum's dtype | reads and writes 832 MiB | - |

Source: optimized HLO (experiments/030_gpu_program); whether a GPU gains is asked by `experiments.gpu`, part ab.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp

from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.jaxprs import Values, read, run, store, traced_as, without_calls
from jaxpipe.program.primitives import FORMS

_ROUND = "convert_element_type"


def with_wide_products(closed: core.ClosedJaxpr, num_gradients: int) -> core.ClosedJaxpr:
    """Returns `closed` without the rounding of those gradients that a product or sum alone makes.

    Args:
        closed: a backward, whose first outputs are gradients of parameters.
        num_gradients: number of these.

    Example:
        >>> x = jnp.ones((4, 2), "bfloat16")
        >>> wide = with_wide_products(jax.make_jaxpr(lambda x, dy: [x.T @ dy])(x, x), 1)
        >>> wide.out_avals
        [ShapedArray(float32[2,2])]
    """
    closed = without_calls(closed)
    jaxpr = closed.jaxpr
    made_by = {out: i for i, equation in enumerate(jaxpr.eqns) for out in equation.outvars}
    uses = [*(v for equation in jaxpr.eqns for v in equation.invars), *jaxpr.outvars]
    num_uses = Counter(v for v in uses if isinstance(v, core.Var))
    wide: set[int] = set()  # equations that keep the dtype of sums
    for gradient in jaxpr.outvars[:num_gradients]:
        wide |= _wide_equations(jaxpr, gradient, made_by, num_uses)
    if not wide:
        return closed

    def without_rounding(*arguments: Any) -> list[Any]:
        values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
        for i, equation in enumerate(jaxpr.eqns):
            if i not in wide:
                run(values, equation)
            elif equation.primitive.name == _ROUND:
                store(values, equation, read(values, equation.invars))
            else:
                store(values, equation, [_bound(equation, read(values, equation.invars))])
        return read(values, jaxpr.outvars)

    return traced_as(closed, without_rounding)


def _wide_equations(jaxpr: core.Jaxpr, gradient: Any, made_by: dict[Any, int], num_uses: Counter[Any]) -> set[int]:
    """Indices of the equations from a product, or a value in the sum's dtype, to `gradient`; none if it has no such."""
    if not isinstance(gradient, core.Var):
        return set()
    dtype = sum_dtype(gradient.aval.dtype)  # pyright: ignore[reportAttributeAccessIssue]
    chain: set[int] = set()
    v: Any = gradient
    # Who reads the value beside this chain reads it rounded, as before: then both forms would be made.
    while v in made_by and num_uses[v] == 1 and v.aval.dtype != dtype:
        i = made_by[v]
        equation = jaxpr.eqns[i]
        name = equation.primitive.name
        chain.add(i)
        if name == "dot_general":
            return chain if all(_is_exact_in(operand.aval, dtype) for operand in equation.invars) else set()
        if name not in FORMS and name != _ROUND:
            return set()
        v = equation.invars[0]
    return chain if v.aval.dtype == dtype else set()


def _is_exact_in(aval: Any, wide: Any) -> bool:
    return jnp.promote_types(aval.dtype, wide) == wide


def _bound(equation: core.JaxprEqn, operands: Sequence[Any]) -> jax.Array:
    """The result of a product in the dtype of sums, or of a change of form in the dtype of its operand."""
    params = dict(equation.params)
    if equation.primitive.name == "dot_general":
        params["preferred_element_type"] = sum_dtype(equation.outvars[0].aval.dtype)  # pyright: ignore
    with equation.ctx.manager:
        return equation.primitive.bind(*operands, **params)
