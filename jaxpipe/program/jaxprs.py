"""Jaxprs as data: inlined calls, and equations run one by one, with values by variable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp

from jaxpipe.mesh.stacks import ADDED_IN_STACK, READ_IN_STACK
from jaxpipe.program.primitives import CALLS
from jaxpipe.program.stacked import Index, slice_at, with_added

Values = dict[core.Var, Any]


def without_calls(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns `closed` with all calls inlined."""

    def flat(jaxpr: core.Jaxpr, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
        for equation in jaxpr.eqns:
            if equation.primitive.name in CALLS:
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


def evaluate(
    equations: Sequence[core.JaxprEqn], values: Values, wanted: Sequence[Any], *, may_add: bool = False
) -> list[Any]:
    """Runs `equations`; returns the values of `wanted`.

    Args:
        equations: equations in their order.
        values: values of the variables that they read; their results are added.
        wanted: variables or literals to return.
        may_add: whether what is wanted may be a `Summand`, where no equation reads it.
    """
    summands = unread(equations, wanted) if may_add else ()
    for equation in equations:
        run(values, equation, summands)
    return read(values, wanted)


def unread(equations: Sequence[core.JaxprEqn], wanted: Sequence[Any]) -> set[core.Var]:
    """The variables among `wanted` that no equation reads."""
    read_here = {id(v) for equation in equations for v in equation.invars}
    return {v for v in wanted if isinstance(v, core.Var) and id(v) not in read_here}


def traced_as(closed: core.ClosedJaxpr, function: Callable[..., Any]) -> core.ClosedJaxpr:
    """The jaxpr of `function`, which takes what `closed` takes."""
    return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars])


def run(values: Values, equation: core.JaxprEqn, summands: Collection[core.Var] = ()) -> None:
    """Runs `equation`; its results are added to `values`, those of `summands` as a `Summand` where they can be."""
    if equation.primitive in ADDED_IN_STACK and set(equation.outvars) <= set(summands):
        return store(values, equation, [Summand(equation, read(values, equation.invars))])
    params = equation.primitive.get_bind_params(equation.params)
    operands = read(values, equation.invars)
    if equation.primitive in READ_IN_STACK:
        place = READ_IN_STACK[equation.primitive]
        value: Any = values.get(equation.invars[place])  # pyright: ignore[reportArgumentType]
        if isinstance(value, InStack):
            operands[place] = stack_of(value.leaf)
            operands[-1] += first_of(value.leaf, value.chunk, value.layer)
    # The settings under which the equation was traced, and its scopes, by which readers of HLO know collectives.
    scope = str(equation.source_info.name_stack)
    with equation.ctx.manager, jax.named_scope(scope) if scope else nullcontext():
        results = equation.primitive.bind(*operands, **params)
    store(values, equation, results if equation.primitive.multiple_results else [results])


def read(values: Values, atoms: Sequence[Any]) -> list[Any]:
    """The values of variables and literals."""
    of_atoms = [atom.val if isinstance(atom, core.Literal) else values[atom] for atom in atoms]
    return [value.array if isinstance(value, InStack) else value for value in of_atoms]


@dataclass(frozen=True)
class InStack:
    """A value that stands in a stack: primitives of `READ_IN_STACK` read it there, others its copy."""

    leaf: jax.Array  # [chunk, layer, ...]
    chunk: Index
    layer: Index

    @property
    def array(self) -> jax.Array:
        """The value."""
        return slice_at(self.leaf, self.chunk, self.layer)[0, 0]


@dataclass(frozen=True)
class Summand:
    """A gradient that is made as it is added to its sum, by a primitive of `ADDED_IN_STACK`."""

    equation: core.JaxprEqn  # that makes it alone
    operands: list[jax.Array]

    @property
    def value(self) -> jax.Array:
        """The gradient alone."""
        return self.equation.primitive.bind(*self.operands, **self.equation.params)

    def added_to(self, leaf: jax.Array, chunk: Index, layer: Index) -> jax.Array:
        """Returns the sums `leaf` [chunk, layer, ...] with the gradient added."""
        made = self.equation.primitive
        params = self.equation.params
        # Sums that are split over devices may be padded; then the layer's part is no part of a stack of kernels.
        if leaf.shape[2:] != self.equation.outvars[0].aval.shape:  # pyright: ignore[reportAttributeAccessIssue]
            return with_added(leaf, self.value, chunk, layer)
        first = jnp.asarray(first_of(leaf, chunk, layer), jnp.int32)
        return ADDED_IN_STACK[made].bind(stack_of(leaf), *self.operands, first, **params).reshape(leaf.shape)


def stack_of(leaf: jax.Array) -> jax.Array:
    """A leaf [chunk, layer, kernel, ...] of experts as "chunk * layer * kernel ..."."""
    return leaf.reshape(-1, *leaf.shape[3:])


def first_of(leaf: jax.Array, chunk: Index, layer: Index) -> Index:
    """Where the kernels of a layer begin there."""
    return (chunk * leaf.shape[1] + layer) * leaf.shape[2]


def in_stacks(closed: core.ClosedJaxpr, num_params: int) -> frozenset[int]:
    """Which of the first `num_params` inputs of a jaxpr without calls are read in their stacks."""
    params = closed.jaxpr.invars[:num_params]
    read_there = {e.invars[READ_IN_STACK[e.primitive]] for e in closed.jaxpr.eqns if e.primitive in READ_IN_STACK}
    return frozenset(i for i, v in enumerate(params) if v in read_there)


def called(closed: core.ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr, of which some arguments may be `InStack`; then some results may be a `Summand`."""
    if not any(isinstance(argument, InStack) for argument in arguments):
        return core.jaxpr_as_fun(closed)(*arguments)
    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
    return evaluate(jaxpr.eqns, values, jaxpr.outvars, may_add=True)


def store(values: Values, equation: core.JaxprEqn, results: Sequence[Any]) -> None:
    """Adds the results of `equation` to `values`."""
    values.update(zip(equation.outvars, results, strict=True))
