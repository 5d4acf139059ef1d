"""An optimizer given in Python acts on each layer's parameters as if they were not stacked, or is refused by name.

Parameters of layers are stacked, [device, chunk, layer, ...], with rows that a shorter stage does not use. An
optimizer makes of the stack the same as of the layers one by one only if it treats numbers alone, as Adam, or sums over
whole trees, as clipping by the global norm. An optimizer that looks at a whole parameter (the norms of LAMB, the rows
and columns of Adafactor) must be shown a layer's. The traced update tells which of these an optimizer is:

* what it makes of a parameter depends on that parameter alone: it is applied to each layer, by `jax.vmap`;
* it also depends on others, by sums over several of them: it is applied to the stack;
* anything else, as both in one optimizer, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as core
import optax

from jaxpipe.checkpoints.state import has_tree_of
from jaxpipe.errors import ConfigError
from jaxpipe.mesh.jax_defaults import default_promotion
from jaxpipe.program.partition import STACKED

Params = Any

# Primitives that make each number of numbers at the same place; a reshape keeps their order.
_BY_NUMBER = (
    *("abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt"),
    *("ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "div", "eq", "erf"),
    *("erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le"),
    *("lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not"),
    *("or", "pow", "reduce_precision", "rem", "reshape", "round", "rsqrt", "select_n", "sign", "sin"),
    *("sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
)
_SUMS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "dot_general")
# Primitives that move numbers and change none: a stack needs others than a layer, so comparisons leave them out.
_FORMS = ("broadcast_in_dim", "expand_dims", "reshape", "squeeze")
# Primitives that join sums over several parameters to a single sum.
_JOINS = (
    *("add", "add_any", "max", "min", "and", "or", "convert_element_type"),
    *("concatenate", *_FORMS, *_SUMS),
)


def by_layer(optimizer: optax.GradientTransformation, params: Params, *, has_flush: bool) -> Any:
    """The optimizer as it acts on staged parameters.

    Args:
        optimizer: the user's, of parameters {"shared", "layers"}.
        params: staged parameters, or their shapes, layers [device, chunk, layer, ...].
        has_flush: whether all gradients of a step are there at once. Without flush the optimizer gets a part of one
            layer at a time, so that it must make each number by itself.

    Raises:
        ConfigError: it cannot be traced, or would make something else of the stack than of the layers.
    """
    rows = {**params, "layers": jax.tree.map(_row, params["layers"])}
    of_rows, of_stack = (_traced(optimizer, tree) for tree in (rows, params))
    # Both traces must be one program, or the answer for one layer says nothing of the stack.
    is_same = of_rows.is_like(of_stack)  # it decides nothing by the shapes of parameters
    stack = of_stack.sources(_of_stack) if is_same else None
    if not has_flush:
        if stack is None or not of_rows.is_apart() or any(value.is_sum_used for value in stack):
            raise _refused(
                "looks at more than a number, and the schedule has no flush",
                "a stage updates its layers one by one, part by part, before the other stages know their gradients",
                "use optimizer.max_grad_norm in place of optax.clip_by_global_norm, another optimizer, or a schedule"
                " with flush, as '1f1b'",
            )
        return optimizer
    # Rows of other numbers, of kinds of layers with other parameters, have no common axis.
    has_axis = len({leaf.shape[: len(STACKED)] for leaf in jax.tree.leaves(params["layers"])}) <= 1
    # With one key every layer would draw the same numbers.
    draws = any(name.startswith("random_bits") for name in _primitives(of_rows.jaxpr.jaxpr))
    if has_axis and of_rows.is_apart() and not draws:
        return _over_rows(optimizer, has_tree_of(params))
    if stack is not None:
        return optimizer
    if not has_axis:
        raise _refused(
            "looks at a parameter as a whole, and kinds of layers have parameters of their own",
            "it would see one layer at a time, and stacks of other layers have other numbers of rows",
            "use an optimizer that makes each number by itself, as AdamW, or one of config.optimizer.name",
        )
    raise _refused(
        "treats parameters by their shapes or norms, and looks at several of them at once",
        "an optimizer either makes of each parameter what that parameter alone says, or sums over several parameters;"
        " layers are stacked",
        "leave optax.clip_by_global_norm out, optimizer.max_grad_norm clips; choose parameters of a mask or label by"
        " name, not by shape",
    )


def _row(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of one layer's parameter."""
    # Device, chunk and layer are the leading dims of every staged parameter.
    return jax.ShapeDtypeStruct(leaf.shape[len(STACKED) :], leaf.dtype)


def _over_rows(optimizer: optax.GradientTransformation, is_staged: Callable[[Any], bool]) -> Any:
    """`optimizer` for one layer after the other; its state has one for each, and what all share once."""
    # In-axes of vmap: layers lose a leading dim, what all share has none. A state's tree of parameters likewise.
    of_params = {"shared": None, "layers": 0}

    def axes(state: Any) -> Any:
        nodes, structure = jax.tree.flatten(state, is_leaf=is_staged)
        return jax.tree.unflatten(structure, [of_params if is_staged(node) else None for node in nodes])

    def mapped(function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Callable[..., Any]:
        # One vmap for each of device, chunk and layer; vmap takes one dim at a time.
        for _ in STACKED:
            function = jax.vmap(function, inputs, outputs)
        return function

    def init(params: Params) -> Any:
        rows = {**params, "layers": jax.tree.map(_row, params["layers"])}
        # The axes of the state follow from its tree alone, so no array of a single layer is made.
        state = jax.eval_shape(optimizer.init, rows)
        return mapped(optimizer.init, (of_params,), axes(state))(params)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        places = axes(state)
        return mapped(optimizer.update, (of_params, places, of_params), (of_params, places))(updates, state, params)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  # optax has tree types


# ---- What an update does, from its jaxpr


class _Value(NamedTuple):
    """The parameters that a value of the update is made of."""

    of: frozenset[int] = frozenset()  # parameters that it depends on, and is aligned with or a sum of
    is_sum: bool = False  # whether it is a sum over whole parameters
    is_sum_used: bool = False  # whether it depends on a sum over several parameters


class _MixedError(Exception):
    """The update does something else than make numbers of numbers, and sums over several parameters."""


class _Update(NamedTuple):
    """A traced update (gradients, state, parameters) -> (updates, state).

    Attributes:
        jaxpr: its jaxpr.
        owners_in, owners_out: [leaf] index of the parameter to which an input or output belongs; None: to none.
        state: shapes of the state.
    """

    jaxpr: core.ClosedJaxpr
    owners_in: list[int | None]
    owners_out: list[int | None]
    state: Any

    def is_like(self, other: _Update) -> bool:
        """Whether both do the same with parameters of other shapes."""
        same_state = jax.tree.structure(self.state) == jax.tree.structure(other.state)
        ndims = [[leaf.ndim for leaf in jax.tree.leaves(update.state)] for update in (self, other)]
        of_layers = [0 if few == many else len(STACKED) for few, many in zip(*ndims, strict=False)]
        is_stacked = all(few + more == many for few, many, more in zip(*ndims, of_layers, strict=False))
        return same_state and is_stacked and _primitives(self.jaxpr.jaxpr) == _primitives(other.jaxpr.jaxpr)

    def is_apart(self) -> bool:
        """Whether what becomes of each parameter depends on that parameter alone, and all else on none."""
        sources = self.sources(_of_rows)
        assert sources is not None
        apart = [value.of <= {owner} for value, owner in zip(sources, self.owners_out, strict=True)]
        # Of a single parameter nobody can tell a norm of it from one of all parameters.
        is_one = len({owner for owner in self.owners_in if owner is not None}) == 1
        return all(apart) and not (is_one and any(value.is_sum_used for value in sources))

    def sources(self, rule: Callable[[core.JaxprEqn, list[_Value]], _Value]) -> list[_Value] | None:
        """[output] what it is made of by `rule`; None if that knows no answer."""
        values = [_Value() if owner is None else _Value(frozenset([owner])) for owner in self.owners_in]
        try:
            return _interpreted(self.jaxpr.jaxpr, values, rule)
        except _MixedError:
            return None


def _traced(optimizer: optax.GradientTransformation, params: Params) -> _Update:
    """The update of parameters of these shapes.

    Raises:
        ConfigError: init or update cannot be traced.
    """
    is_staged = has_tree_of(params)

    def owners(tree: Any) -> list[int | None]:
        """[leaf] index of the parameter that it belongs to."""
        places: list[int | None] = []
        for node in jax.tree.leaves(tree, is_leaf=is_staged):
            if not is_staged(node):
                places.append(None)
                continue
            # `optax.masked` leaves MaskedNode in place of a parameter. It has no leaves of its own, but counts in the
            # numbering.
            leaves = jax.tree.leaves(node, is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode))
            places += [k for k, leaf in enumerate(leaves) if not isinstance(leaf, optax.MaskedNode)]
        return places

    try:
        with default_promotion():
            state = jax.eval_shape(optimizer.init, params)
            jaxpr, outputs = jax.make_jaxpr(optimizer.update, return_shape=True)(params, state, params)
    except Exception as error:
        # The function is the user's, so that any error may come out of it; all mean the same here.
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} cannot be traced: {type(error).__name__}",
            rule="given-optimizer: an optax.GradientTransformation, whose update takes gradients, state and"
            " parameters and nothing else",
            picture=str(error),
            repair="give for example optimizer=optax.adamw(1e-3)",
        ) from error
    return _Update(jaxpr, owners((params, state, params)), owners(outputs), state)


def _primitives(jaxpr: core.Jaxpr) -> list[str]:
    """Names of all equations, but for those that change a form and no number."""
    names = []
    for equation in jaxpr.eqns:
        inner = list(core.jaxprs_in_params(equation.params))
        # A name of a form is left out, but its inner jaxprs are still read.
        names += [] if equation.primitive.name in _FORMS else [equation.primitive.name]
        names += [name for called in inner for name in _primitives(called)]
    return names


def _interpreted(
    jaxpr: core.Jaxpr, values: Sequence[_Value], rule: Callable[[core.JaxprEqn, list[_Value]], _Value]
) -> list[_Value]:
    """[output] what it is made of, given that of the inputs."""
    known = dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> _Value:
        # A number written in the jaxpr or closed over belongs to no parameter.
        return _Value() if isinstance(atom, core.Literal) else known.get(atom, _Value())  # constants

    for equation in jaxpr.eqns:
        read_here = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        params = equation.params
        if name == "cond":
            # The number that chooses a branch decides every output, as much as the branch itself does.
            (chooses, *given) = read_here
            branches = params["branches"]
            of_branches = [_interpreted(branch.jaxpr, given, rule) for branch in branches]
            outputs = [rule(equation, [chooses, *of_output]) for of_output in zip(*of_branches, strict=True)]
        elif name in ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2"):
            called: Any = params.get("call_jaxpr", params.get("jaxpr"))
            outputs = _interpreted(getattr(called, "jaxpr", called), read_here, rule)
        else:
            # Loops and other primitives with jaxprs inside count as one opaque function of all their inputs.
            outputs = [rule(equation, read_here)] * len(equation.outvars)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _of_rows(equation: core.JaxprEqn, values: list[_Value]) -> _Value:
    """The value of an equation depends on all that the equation reads."""
    is_sum_used = any(value.is_sum_used for value in values) or equation.primitive.name in _SUMS
    return _Value(frozenset().union(*(value.of for value in values)), is_sum_used=is_sum_used)


def _of_stack(equation: core.JaxprEqn, values: list[_Value]) -> _Value:
    """Numbers of numbers, or sums over all of several parameters, which are those of the layers one by one.

    Raises:
        _MixedError: it is anything else.
    """
    name = equation.primitive.name
    of = frozenset().union(*(value.of for value in values))
    is_sum_used = any(value.is_sum_used for value in values)
    aligned = [value for value in values if value.of and not value.is_sum]
    sums = [value for value in values if value.is_sum]
    # The global norm arises here: sums of parameters, joined with sums of others.
    if sums and not aligned and name in _JOINS:
        return _Value(of, is_sum=True)
    if any(len(value.of) < 2 for value in sums):
        raise _MixedError  # the norm of one parameter, of all layers together
    is_sum_used |= bool(sums)
    of = frozenset().union(*(value.of for value in aligned))
    if not aligned or name in (*_BY_NUMBER, "cond"):
        return _Value(of, is_sum_used=is_sum_used)
    # Only a sum over all dims: one over some would be of other numbers in the stack than in a layer.
    is_scalar = all(out.aval.shape == () for out in equation.outvars)  # pyright: ignore[reportAttributeAccessIssue]
    if is_scalar and name in _SUMS:
        return _Value(of, is_sum=True)
    raise _MixedError


def _refused(does: str, rule: str, repair: str) -> ConfigError:
    return ConfigError(f"the optimizer {does}", rule=f"optimizer-by-layer: {rule}", repair=repair)
