"""Cuts a backward in two, so that the second half moves as few bytes as possible and recomputes no product.

Goes in: a jaxpr without calls, and the outputs that are wanted now. Comes out: the equations of either half, and
the values that the first saves for the second. A product that no wanted output needs is deferred, with all equations
that depend on it. What these read is saved, or computed again from saved values, whichever moves fewer bytes (a minimum
cut, as in the partitioner of PyTorch's AOTAutograd; `moved_bytes` is the cost). All else runs now, so that sums over
tokens (gradients of biases and norms) save nothing for later.
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

from jaxpipe.mesh.stacks import ADDED_IN_STACK, READ_IN_STACK
from jaxpipe.program.primitives import COLLECTIVES, FOREIGN, FORMS, PRODUCTS

Atom = core.Var | core.Literal

# Primitives that compute nothing: the second half may repeat them, so that the smaller of the two forms of a value is
# saved. It may also repeat primitives that make random keys, which no page can hold.
# The last three move values and compute none: gathered parameters are had again from their parts.
_FORM = FORMS | {"broadcast_in_dim", "convert_element_type", "all_gather", "all_to_all", "gather"}
_COMBINE = ("reduce", "scatter", "select_and_scatter")  # their jaxprs combine two elements into one
# These look elementwise and are not cheap, or draw other numbers on other devices: computed once, now.
_NOT_AGAIN = COLLECTIVES | {"axis_index", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k"}
_NOT_AGAIN |= {"dynamic_update_slice", "erf_inv", "random_bits", "random_gamma", "reduce_precision", "threefry2x32"}


@dataclass(frozen=True)
class Cut:
    """A jaxpr cut in two."""

    now: list[core.JaxprEqn]  # equations in their order
    later: list[core.JaxprEqn]  # the same; those that only change the form of a value may be in both
    saved: list[core.Var]  # values that `later` reads and `now` has: its results, or inputs of the jaxpr
    is_early: list[bool]  # [output] whether `now` computes it


def cut(
    jaxpr: core.Jaxpr,
    is_wanted: Sequence[bool],
    *,
    params: Collection[core.Var] = (),
    given: Collection[core.Var] = (),
    deferred: Collection[core.Var] = (),
    gradients: Collection[core.Var] | None = None,
    stored: Collection[core.Var] = (),
) -> Cut:
    """The cut of `jaxpr` that moves the fewest bytes.

    Args:
        jaxpr: a jaxpr without calls.
        is_wanted: [output] whether it is computed now.
        params: inputs that the second half has anyway, and from which it may compute anything but products.
        given: other inputs that the second half has anyway.
        deferred: inputs that the first half does not have.
        gradients: inputs whose dependents may be deferred; products that do not depend on them are recomputation of the
            forward, and run now. By default all inputs.
        stored: inputs that the second half can read where they are.

    Example:
        The backward of `tanh(x) @ kernel`, of which dx is wanted now. The product for dkernel is deferred. It reads
        tanh(x), which runs now in any case, since dx needs it, and dy as it came in: these two are saved.

        >>> def backward(kernel, x, dy):
        ...     y = jnp.tanh(x)
        ...     return y.T @ dy, (dy @ kernel.T) * (1 - y * y)  # dkernel, dx
        >>> jaxpr = jax.make_jaxpr(backward)(jnp.ones((3, 3)), jnp.ones((2, 3)), jnp.ones((2, 3))).jaxpr
        >>> halves = cut(jaxpr, [False, True], params=jaxpr.invars[:1], gradients=jaxpr.invars[2:])
        >>> [equation.primitive.name for equation in halves.later]
        ['transpose', 'dot_general']
        >>> [v.aval.shape for v in halves.saved], halves.saved[0] is jaxpr.invars[2]
        ([(2, 3), (2, 3)], True)
    """
    wanted = _needed(jaxpr.eqns, [out for out, w in zip(jaxpr.outvars, is_wanted, strict=True) if w])
    # Deferred are products that no wanted output needs, and all equations that depend on one.
    of_gradients = _after(jaxpr.eqns, set(jaxpr.invars if gradients is None else gradients))
    is_later = _products_and_after(jaxpr.eqns, wanted | (set(range(len(jaxpr.eqns))) - of_gradients), deferred)
    after = {out for i in is_later for out in jaxpr.eqns[i].outvars} | set(deferred)
    # A literal needs no equation: a gradient that is zero everywhere.
    is_early = [isinstance(out, core.Literal) or out not in after for out in jaxpr.outvars]
    # Their inputs are saved, or computed from saved values, whichever takes fewer bytes.
    of_params = _from(jaxpr.eqns, set(params) | set(jaxpr.constvars))
    sources = _Sources(jaxpr, wanted, is_later, of_params | set(given), stored)
    saved = sources.cheapest([v for i in sorted(is_later) for v in _vars(jaxpr.eqns[i].invars) if v not in after])
    # Each half gets the equations between the saved values and its outputs.
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
    """[input] whether a wanted output depends on the input."""
    outs = [out for out, wanted in zip(jaxpr.outvars, is_wanted, strict=True) if wanted]
    equations = [jaxpr.eqns[i] for i in _needed(jaxpr.eqns, outs)]
    read = {v for equation in equations for v in _vars(equation.invars)} | set(_vars(outs))
    return [v in read for v in jaxpr.invars]


def _vars(atoms: Iterable[Atom]) -> list[core.Var]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _needed(equations: Sequence[core.JaxprEqn], outs: Iterable[Atom], known: Collection[core.Var] = ()) -> set[int]:
    """Indices of the equations that lead from `known` values to `outs`."""
    values = set(_vars(outs)) - set(known)
    needed = set()
    # From the end, so that every reader of a value is known before the equation that makes it.
    for i in reversed(range(len(equations))):
        if not values.isdisjoint(equations[i].outvars):
            needed.add(i)
            values.update(v for v in _vars(equations[i].invars) if v not in known)
    return needed


def _after(equations: Sequence[core.JaxprEqn], values: set[core.Var]) -> set[int]:
    """Indices of the equations that depend on `values`."""
    dependent = set()
    for i, equation in enumerate(equations):
        if not values.isdisjoint(_vars(equation.invars)):
            dependent.add(i)
            values.update(equation.outvars)
    return dependent


def _products_and_after(
    equations: Sequence[core.JaxprEqn], done_now: set[int], deferred: Collection[core.Var]
) -> set[int]:
    """Indices of the products that are not `done_now`, and of equations that depend on these or deferred inputs."""
    values = set(deferred)
    later = set()
    for i, equation in enumerate(equations):
        depends = not values.isdisjoint(_vars(equation.invars))
        if i not in done_now and (depends or is_product(equation)):
            later.add(i)
            values.update(equation.outvars)
    return later


def _from(equations: Sequence[core.JaxprEqn], values: set[core.Var]) -> set[core.Var]:
    """`values` and all that can be computed from them alone without a product."""
    known = set(values)
    for equation in equations:
        if known.issuperset(_vars(equation.invars)) and not is_product(equation) and not equation.effects:
            known.update(equation.outvars)
    return known


def is_product(equation: core.JaxprEqn) -> bool:
    """Whether an equation may be expensive: a matmul or convolution, a loop or branch, or foreign code."""
    name = equation.primitive.name
    if name.startswith(_COMBINE):
        return False
    if equation.primitive in READ_IN_STACK or equation.primitive in ADDED_IN_STACK:
        return True
    return name in PRODUCTS | FOREIGN or any(True for _ in core.jaxprs_in_params(equation.params))


class _Sources:
    """The graph of the values that could be saved for the second half, and of the values that follow from them.

    A node is a value with its forms that are no smaller (a transpose, a copy in a wider dtype). An edge a -> b says
    that the second half can compute b from a, cheaply. A root is a node that it may not compute: an input, a product,
    or what the first half computes anyway and is not elementwise. Every path from a root to a value that the second
    half reads must pass a saved node; the saved nodes are a minimum vertex cut, with `moved_bytes` as costs.

    Example:
        x (8 bytes) -> mask = x > 0 (2 bytes) -> select, which the second half reads. If x is stored already, saving it
        costs a read of 8 bytes, and saving the mask 3 * 2: it is written, too.
    """

    def __init__(
        self,
        jaxpr: core.Jaxpr,
        wanted: set[int],
        is_later: Collection[int],
        free: set[core.Var],
        stored: Collection[core.Var],
    ):
        self.node: dict[core.Var, int] = {}
        self.base: list[core.Var] = []  # [node] its smallest form
        self.bytes: list[int] = []  # [node]
        self.cost: list[int] = []  # [node] bytes that are moved if it is saved
        self.roots: list[int] = []
        self.edges: list[tuple[int, int]] = []
        self.free = set(free)  # values that the second half has anyway
        for v in jaxpr.invars:
            if v not in free:
                self.roots.append(self._add(v, is_stored=v in stored))
        for i, equation in enumerate(jaxpr.eqns):
            if i in is_later or self.free.issuperset(equation.outvars):
                continue
            read = [self.node[v] for v in _vars(equation.invars) if v in self.node]
            is_form = equation.primitive.name in _FORM or all(map(_is_key, equation.outvars))
            # A value made of what the second half has anyway.
            if is_form and not read:
                self.free.update(equation.outvars)
                continue
            for out in equation.outvars:
                if is_form and len(read) == 1 and self.bytes[read[0]] <= _bytes(out):
                    self.node[out] = read[0]
                    continue
                node = self._add(out)
                if is_form or is_elementwise(equation) or (i not in wanted and not _runs_once(equation)):
                    self.edges += [(source, node) for source in read]
                else:
                    self.roots.append(node)

    def _add(self, v: core.Var, *, is_stored: bool = False) -> int:
        self.node[v] = len(self.base)
        self.base.append(v)
        self.bytes.append(_bytes(v))
        self.cost.append(moved_bytes(v, is_stored=is_stored))
        return self.node[v]

    def cheapest(self, read: Iterable[core.Var]) -> list[core.Var]:
        """The values from which all of `read` follow, by the fewest bytes moved; of equals, those nearest to `read`."""
        sinks = sorted({self.node[v] for v in read if v not in self.free})
        if not sinks:
            return []
        # A maximum flow is a minimum cut of edges. To cut nodes, node n becomes the edge 2n -> 2n + 1 with the capacity
        # of its bytes; all other edges have more than any cut. Flows are of 32 bits, so bytes are counted in units.
        num_nodes = len(self.base)
        source = 2 * num_nodes
        sink = 2 * num_nodes + 1
        # So the sum stays below 2 ** 29, and `unlimited` and all flows within int32.
        unit = max(sum(self.cost) >> 28, 1)
        # Rounded up, and never 0: a node without capacity would be cut for nothing.
        capacity = [max(-(-cost // unit), 1) for cost in self.cost]
        unlimited = sum(capacity) + 1
        capacity = [unlimited if _is_key(v) else num_units for v, num_units in zip(self.base, capacity, strict=True)]
        edges = [(2 * n, 2 * n + 1, capacity[n]) for n in range(num_nodes)]
        # `dict.fromkeys` takes doubles out and keeps the order, so that equal cuts are always the same one.
        edges += [(2 * a + 1, 2 * b, unlimited) for a, b in dict.fromkeys(self.edges)]
        edges += [(source, 2 * n, unlimited) for n in self.roots] + [(2 * n + 1, sink, unlimited) for n in sinks]
        rows, columns, values = np.array(edges, dtype=np.int32).T
        graph = coo_array((values, (rows, columns)), shape=(sink + 1, sink + 1)).tocsr()
        # The cut: nodes whose far side still reaches the sink through free capacity, and whose near side does not.
        residual = graph - maximum_flow(graph, source, sink).flow
        residual.eliminate_zeros()
        reaches = set(breadth_first_order(residual.T.tocsr(), sink, return_predecessors=False).tolist())
        return [self.base[n] for n in range(num_nodes) if 2 * n not in reaches and 2 * n + 1 in reaches]


def moved_bytes(v: core.Var, *, is_stored: bool) -> int:
    """Bytes that XLA moves on a GPU if `v` is saved for the second half.

    The second half reads it. One that is not stored already is written first, by a kernel of its own that reads it: no
    product writes into a page, since its place is not known ahead. What is computed again from saved values costs
    nothing more: a product takes its operands from arrays of their own, so that what is only read is copied there, too.
    Source: optimized HLO of LLaMA-3 8B for an H100, jax 0.12.0.1 (experiments/030_gpu_program).

    Args:
        v: a value.
        is_stored: whether the second half can read it where it is, as a residual, which F has stored.
    """
    return _bytes(v) if is_stored else 3 * _bytes(v)


def is_elementwise(equation: core.JaxprEqn) -> bool:
    """Whether an equation computes each element from those at its place, or sums: it fuses with what reads it."""
    if _runs_once(equation) or equation.primitive.name in _NOT_AGAIN:
        return False
    if equation.primitive.name in ("reduce_sum", "reduce_max", "reduce_min"):
        return True
    return all(_spreads(v, out) for v in equation.invars for out in equation.outvars)


def _spreads(v: Atom, out: core.Var) -> bool:
    """Whether an operand of an elementwise equation may have the shape of `v`: a scalar, or with ones in some dims."""
    shape = v.aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    wide = out.aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    return not shape or (len(shape) == len(wide) and all(n in (1, m) for n, m in zip(shape, wide, strict=True)))


def _runs_once(equation: core.JaxprEqn) -> bool:
    return bool(equation.effects) or is_product(equation)


def _bytes(v: core.Var) -> int:
    """Bytes of a value; an empty one counts as one byte, so that it is saved only if it is read."""
    return max(v.aval.size * v.aval.dtype.itemsize, 1)  # pyright: ignore[reportAttributeAccessIssue]


def _is_key(v: core.Var) -> bool:
    """Whether a value holds random keys, a dtype that numpy does not have."""
    dtype = v.aval.dtype  # pyright: ignore[reportAttributeAccessIssue]
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)
