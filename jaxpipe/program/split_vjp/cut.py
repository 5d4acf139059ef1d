"""Where is a backward cut in two, so that the second half is given few bytes and computes nothing anew?

Goes in: a jaxpr without calls, and which of its outputs are wanted now. Comes out: the equations of either half, and
the values that the first hands to the second. A product that is not wanted now, and what depends on one, is put off;
what only leads to such a product stands on the side where the cut is cheapest (a minimum cut, as in the partitioner
of PyTorch's AOTAutograd); all else is done now, so that sums over tokens (gradients of biases and norms) leave nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

Atom = core.Var | core.Literal

# They compute nothing: the second half may repeat them, to be given the smaller of the two forms of a value. So it may
# what makes random keys, which no page can hold.
_FORM = {"broadcast_in_dim", "convert_element_type", "copy", "expand_dims", "reshape", "rev", "squeeze", "transpose"}
_FORM |= {"all_gather"}
_PRODUCTS = {"conv_general_dilated", "dot_general", "ragged_dot", "ragged_dot_general"}
_COMBINE = ("reduce", "scatter", "select_and_scatter")  # their jaxprs say how two numbers become one
_FOREIGN = {"custom_call", "ffi_call", "pallas_call", "pure_callback", "triton_kernel_call"}


@dataclass(frozen=True)
class Cut:
    """Two halves of a jaxpr.

    Attributes:
        now, later: equations in their order; those that only change the form of a value may stand in both.
        saved: values that `later` reads and `now` has: its results, or inputs of the jaxpr.
        is_early: [output] whether `now` computes it.
    """

    now: list[core.JaxprEqn]
    later: list[core.JaxprEqn]
    saved: list[core.Var]
    is_early: list[bool]


def cut(
    jaxpr: core.Jaxpr,
    is_wanted: Sequence[bool],
    *,
    params: Collection[core.Var] = (),
    given: Collection[core.Var] = (),
    put_off: Collection[core.Var] = (),
    gradients: Collection[core.Var] | None = None,
) -> Cut:
    """The halves of `jaxpr`.

    Args:
        jaxpr: without calls.
        is_wanted: [output] whether it is computed now.
        params: inputs that the second half has anyway, and from which it may compute whatever is no product.
        given: other inputs that it has anyway.
        put_off: inputs that the first half does not have.
        gradients: inputs on which the products depend that are put off; others compute forward again, which is done
            now. By default all inputs.
    """
    wanted = _needed(jaxpr.eqns, [out for out, w in zip(jaxpr.outvars, is_wanted, strict=True) if w])
    of_gradients = _after(jaxpr.eqns, set(jaxpr.invars if gradients is None else gradients))
    is_later = _products_and_after(jaxpr.eqns, wanted | (set(range(len(jaxpr.eqns))) - of_gradients), put_off)
    after = {out for i in is_later for out in jaxpr.eqns[i].outvars} | set(put_off)
    is_early = [isinstance(out, core.Literal) or out not in after for out in jaxpr.outvars]
    of_params = _from(jaxpr.eqns, set(params) | set(jaxpr.constvars))
    sources = _Sources(jaxpr, wanted, is_later, of_params | set(given))
    saved = sources.cheapest([v for i in sorted(is_later) for v in _vars(jaxpr.eqns[i].invars) if v not in after])
    known = set(saved) | set(params) | set(given) | set(jaxpr.constvars)
    outs = [out for out, early in zip(jaxpr.outvars, is_early, strict=True) if not early]
    later = _needed(jaxpr.eqns, outs, known=known)
    early = [out for out, e in zip(jaxpr.outvars, is_early, strict=True) if e]
    now = _needed(jaxpr.eqns, [*early, *saved])
    return Cut(
        now=[jaxpr.eqns[i] for i in sorted(now)],
        later=[jaxpr.eqns[i] for i in sorted(later)],
        saved=saved,
        is_early=is_early,
    )


def needed_inputs(jaxpr: core.Jaxpr, is_wanted: Sequence[bool]) -> list[bool]:
    """[input] whether a wanted output depends on it."""
    outs = [out for out, wanted in zip(jaxpr.outvars, is_wanted, strict=True) if wanted]
    equations = [jaxpr.eqns[i] for i in _needed(jaxpr.eqns, outs)]
    read = {v for equation in equations for v in _vars(equation.invars)} | set(_vars(outs))
    return [v in read for v in jaxpr.invars]


def _vars(atoms: Iterable[Atom]) -> list[core.Var]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _needed(equations: Sequence[core.JaxprEqn], outs: Iterable[Atom], known: Collection[core.Var] = ()) -> set[int]:
    """Indices of the equations that lead from `known` values to `outs`."""
    values, needed = set(_vars(outs)) - set(known), set()
    for i in reversed(range(len(equations))):
        if not values.isdisjoint(equations[i].outvars):
            needed.add(i)
            values.update(v for v in _vars(equations[i].invars) if v not in known)
    return needed


def _after(equations: Sequence[core.JaxprEqn], values: set[core.Var]) -> set[int]:
    """Indices of the equations that depend on `values`."""
    found = set()
    for i, equation in enumerate(equations):
        if not values.isdisjoint(_vars(equation.invars)):
            found.add(i)
            values.update(equation.outvars)
    return found


def _products_and_after(
    equations: Sequence[core.JaxprEqn], done_now: set[int], put_off: Collection[core.Var]
) -> set[int]:
    """Indices of the products that are not `done_now`, and of what depends on one or on what is put off."""
    values, found = set(put_off), set()
    for i, equation in enumerate(equations):
        depends = not values.isdisjoint(_vars(equation.invars))
        if i not in done_now and (depends or is_product(equation)):
            found.add(i)
            values.update(equation.outvars)
    return found


def _from(equations: Sequence[core.JaxprEqn], values: set[core.Var]) -> set[core.Var]:
    """`values` and what can be computed of them alone without a product."""
    found = set(values)
    for equation in equations:
        if found.issuperset(_vars(equation.invars)) and not is_product(equation) and not equation.effects:
            found.update(equation.outvars)
    return found


def is_product(equation: core.JaxprEqn) -> bool:
    """Whether it may cost much: a matrix product or convolution, a loop or branch, or what is no jaxpr."""
    name = equation.primitive.name
    if name.startswith(_COMBINE):
        return False
    return name in _PRODUCTS | _FOREIGN or any(True for _ in core.jaxprs_in_params(equation.params))


class _Sources:
    """The graph of what the second half could be given, and compute from it."""

    def __init__(self, jaxpr: core.Jaxpr, wanted: set[int], is_later: Collection[int], free: set[core.Var]):
        self.node: dict[core.Var, int] = {}  # one for a value and its other forms that are no smaller
        self.base: list[core.Var] = []  # [node]
        self.cost: list[int] = []  # [node] bytes
        self.roots: list[int] = []  # nodes that the second half cannot compute
        self.edges: list[tuple[int, int]] = []
        self.free = set(free)
        for v in jaxpr.invars:
            if v not in free:
                self.roots.append(self._add(v))
        for i, equation in enumerate(jaxpr.eqns):
            if i in is_later or self.free.issuperset(equation.outvars):
                continue
            read = [self.node[v] for v in _vars(equation.invars) if v in self.node]
            is_form = equation.primitive.name in _FORM or all(map(_is_key, equation.outvars))
            if is_form and not read:
                self.free.update(equation.outvars)
                continue
            for out in equation.outvars:
                if is_form and len(read) == 1 and self.cost[read[0]] <= _bytes(out):
                    self.node[out] = read[0]
                    continue
                node = self._add(out)
                if is_form or (i not in wanted and not equation.effects and not is_product(equation)):
                    self.edges += [(source, node) for source in read]
                else:
                    self.roots.append(node)

    def _add(self, v: core.Var) -> int:
        self.node[v] = len(self.base)
        self.base.append(v)
        self.cost.append(_bytes(v))
        return self.node[v]

    def cheapest(self, read: Iterable[core.Var]) -> list[core.Var]:
        """The values from which all of `read` follow, with the least bytes; of equals, those nearest to `read`."""
        sinks = sorted({self.node[v] for v in read if v not in self.free})
        if not sinks:
            return []
        # A node is two of the flow graph, 2n -> 2n + 1, with an edge of its cost between them.
        num_nodes = len(self.base)
        source, sink = 2 * num_nodes, 2 * num_nodes + 1
        unit = max(sum(self.cost) >> 28, 1)
        capacity = [max(-(-cost // unit), 1) for cost in self.cost]
        unlimited = sum(capacity) + 1
        capacity = [unlimited if _is_key(v) else each for v, each in zip(self.base, capacity, strict=True)]
        edges = [(2 * n, 2 * n + 1, capacity[n]) for n in range(num_nodes)]
        edges += [(2 * a + 1, 2 * b, unlimited) for a, b in dict.fromkeys(self.edges)]
        edges += [(source, 2 * n, unlimited) for n in self.roots] + [(2 * n + 1, sink, unlimited) for n in sinks]
        rows, columns, values = np.array(edges, dtype=np.int32).T
        graph = coo_array((values, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
        left = graph - maximum_flow(graph, source, sink).flow
        left.eliminate_zeros()
        reaches = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
        return [self.base[n] for n in range(num_nodes) if 2 * n not in reaches and 2 * n + 1 in reaches]


def _bytes(v: core.Var) -> int:
    """Of a value; one of no size counts as one, so that it is handed on only where it is read."""
    return max(v.aval.size * v.aval.dtype.itemsize, 1)  # pyright: ignore[reportAttributeAccessIssue]


def _is_key(v: core.Var) -> bool:
    """Whether it is of random keys, a dtype that numpy does not have."""
    dtype = v.aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
