"""Jaxprs as data: inlined calls, and equations run one by one, with values by variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as core

Values = dict[core.Var, Any]

_CALLS = {"checkpoint", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
_CALLS |= {"jit", "pjit", "remat2"}


def without_calls(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns `closed` with all calls inlined."""

    def flat(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
        for equation in jaxpr.eqns:
            if equation.primitive.name in _CALLS:
                # Custom derivatives name it one way, jit and remat the other; some are closed, some take constants
                # apart.
                called: Any = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
                is_closed = isinstance(called, core.ClosedJaxpr)
                inner, inner_consts = (called.jaxpr, called.consts) if is_closed else (called, ())
                store(values, equation, flat(inner, inner_consts, read(values, equation.invars)))
            else:
                run(values, equation)
        return read(values, jaxpr.outvars)

    return traced_as(closed, lambda *arguments: flat(closed.jaxpr, closed.consts, arguments))


def num_consts_and_carry(params: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many its carry; jax 0.12 writes them as a tree of inputs."""
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def evaluate(equations: Sequence[core.JaxprEqn], values: Values, wanted: Sequence[Any]) -> list[Any]:
    """Runs `equations`; returns the values of `wanted`.

    Args:
        equations: equations in their order.
        values: values of the variables that they read; their results are added.
        wanted: variables or literals to return.
    """
    for equation in equations:
        run(values, equation)
    return read(values, wanted)


def traced_as(closed: core.ClosedJaxpr, function: Callable[..., Any]) -> core.ClosedJaxpr:
    """The jaxpr of `function`, which takes what `closed` takes."""
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars])


def run(values: Values, equation: core.JaxprEqn) -> None:
    """Runs `equation`; its results are added to `values`."""
    params = equation.primitive.get_bind_params(equation.params)
    # The settings under which the equation was traced, such as XLA's metadata of a scope.
    with equation.ctx.manager:
        results = equation.primitive.bind(*read(values, equation.invars), **params)
    store(values, equation, results if equation.primitive.multiple_results else [results])


def read(values: Values, atoms: Sequence[Any]) -> list[Any]:
    """The values of variables and literals."""
    return [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in atoms]


def store(values: Values, equation: core.JaxprEqn, results: Sequence[Any]) -> None:
    """Adds the results of `equation` to `values`."""
    values.update(zip(equation.outvars, results, strict=True))
