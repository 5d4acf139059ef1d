"""Two computations side by side: what one exchanges between devices travels while the other multiplies matrices.

Goes in: the jaxprs of two layers that do not need each other, a forward and a backward. Each is cut into phases, in
turns of collectives and of products, and they run a phase apart:

    step        0      1      2      3      4      5      6
    first       K      P      K      P      K      late
    second             K      P      K      P      K

P has the products that wait for the collectives before them; K the collectives that wait for these, with what is
elementwise between them. `late` are gradients of kernels: nobody waits for them, so they come a phase after what they
read, and the last of them are there when the second ends in collectives. In tensor-parallel layers all collectives but
the first of a turn so have products of the other beside them. Where one has fewer phases, its products are parted.

The compiler alone does not find this order: it joins collectives of both, which then wait for both, and have nothing
beside them. On GPUs barriers between the steps keep it. XLA takes these out after it has scheduled the program, so that
they cost nothing. On CPUs, where it does so before, each collective reads what the one before it has brought.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.2.1, for the two directions. That phases are read off jaxprs is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.mesh.in_order import after, ordered_after
from jaxpipe.program.jaxprs import Values, read, run, unread
from jaxpipe.program.primitives import COLLECTIVES
from jaxpipe.program.split_vjp.cut import is_product

Phase = list[core.JaxprEqn]


@dataclass(frozen=True, eq=False)
class Phases:
    """A jaxpr without calls, by phases: even ones have its collectives, odd ones its products.

    Example:
        Two gathers, each before a product; nobody waits for the first one.

        >>> def layer(x, kernel):
        ...     y = jax.lax.all_gather(x, "axis", tiled=True) * 2
        ...     return y.T @ y, jax.lax.all_gather(x + y[:2], "axis", tiled=True) @ kernel
        >>> shapes = jnp.ones((2, 4)), jnp.ones((4, 4))
        >>> closed = jax.make_jaxpr(layer, axis_env=[("axis", 2)])(*shapes)
        >>> phases = Phases.of(closed, closed.jaxpr.invars[:1], waited=closed.jaxpr.outvars[1:]).phases
        >>> [[e.primitive.name for e in phase if e.primitive.name in ("all_gather", "dot_general")] for phase in phases]
        [['all_gather', 'all_gather'], ['dot_general'], [], ['dot_general']]
    """

    closed: core.ClosedJaxpr
    handed: frozenset[core.Var]  # the inputs that the layer before has made
    phases: tuple[Phase, ...]
    num_products: int  # phases of products without that of what nobody waits for

    @classmethod
    def of(cls, closed: core.ClosedJaxpr, handed: Sequence[core.Var], waited: Sequence[Any]) -> Phases:
        """The phases of `closed`.

        Args:
            closed: a jaxpr without calls.
            handed: the inputs that the layer before has made.
            waited: the outputs that somebody waits for. A product that leads to none of them, and to no collective,
                comes a phase later than it could.
        """
        equations = closed.jaxpr.eqns
        is_waited = _is_waited(equations, waited)
        places = _places(equations, is_waited)
        last = max((place for place, is_here in zip(places, is_waited, strict=True) if is_here), default=0)
        phases = [[] for _ in range(max(places, default=0) + 1)]
        for equation, place in zip(equations, places, strict=True):
            phases[place].append(equation)
        return cls(closed, frozenset(handed), tuple(phases), (last + 1) // 2)


Side = tuple[Phases, Sequence[Any], str]  # phases, what the jaxpr reads, the name of the scope in which it is run


def side_by_side(one: Side, other: Side, num_done: jax.Array | None = None) -> tuple[list[Any], list[Any]]:
    """The results of two jaxprs, run so that collectives of each stand beside products of the other.

    Args:
        one, other: the two; nobody waits for some products of the first.
        num_done: on platforms without barriers what orders collectives: a number that is never negative.
    """
    runs = _Run(*one), _Run(*other)
    most = max(side.num_products for side in runs)
    for side in runs:
        side.part(most)
    # Nothing is beside the first collectives of the one that begins, so they should be few; and those of the other that
    # come last have what nobody waits for beside them.
    first, second = sorted(runs, key=lambda side: _num_bytes(side.phases[0]))
    # Two more than the phases of either: the second is one behind, and what nobody waits for may come after the last.
    for step in range(2 * most + 3):
        here = (first, first.phase(step)), (second, second.phase(step - 1))
        (exchanging, collectives), (multiplying, products) = here if step % 2 == 0 else here[::-1]
        # Those that wait for others have products of their own beside them.
        waves = _waves(collectives)
        for wave, share in zip(waves, _shares(products, [_num_bytes(wave) for wave in waves]), strict=True):
            # Nothing else is between the ties: XLA begins collectives late, and ends them before what reads them.
            before, at_once, behind = _around_collectives(wave)
            exchanging.run(before, None)
            if num_done is None:
                _tie(runs)
            num_done = exchanging.run(at_once, num_done)
            num_done = multiplying.run(share, num_done)
            if num_done is None:
                _tie(runs)
            exchanging.run(behind, None)
    return runs[0].results, runs[1].results


class _Run:
    """A jaxpr that is run phase by phase."""

    def __init__(self, phases: Phases, arguments: Sequence[Any], scope: str):
        closed = phases.closed
        jaxpr = closed.jaxpr
        self.phases = list(phases.phases)
        self.num_products = phases.num_products
        self.values: Values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
        self._jaxpr = jaxpr
        self._made = set(phases.handed)  # what waits for other steps, apart from parameters and what is saved
        self._done: set[int] = set()  # ids of equations
        self._summands = unread(jaxpr.eqns, jaxpr.outvars)
        self._scope = scope

    @property
    def results(self) -> list[Any]:
        """What the jaxpr returns, when all phases have been run."""
        return read(self.values, self._jaxpr.outvars)

    def part(self, num_products: int) -> None:
        """Parts phases of products, the largest first, until there are so many."""
        self.phases += [[] for _ in range(2 * self.num_products + 1 - len(self.phases))]
        while self.num_products < num_products:
            place = max(range(1, len(self.phases), 2), key=lambda place: _work(self.phases[place]), default=0)
            first, second = _shares(self.phases[place], [1, 1])
            self.phases[place : place + 1] = [first, [], second]
            self.num_products += 1

    def phase(self, place: int) -> Phase:
        """The equations of a phase; none if there is no such phase."""
        return self.phases[place] if 0 <= place < len(self.phases) else []

    @property
    def waiting(self) -> list[core.Var]:
        """What has been made, and is read by what has not been run."""
        ahead = [e for e in self._jaxpr.eqns if id(e) not in self._done]
        # A dict keeps the order, which must be the same in all processes.
        return [v for v in dict.fromkeys(v for e in ahead for v in e.invars if _is_array(v)) if v in self._made]

    def run(self, equations: Phase, num_done: jax.Array | None) -> jax.Array | None:
        """Runs equations; returns what orders the collectives behind them."""
        with jax.named_scope(self._scope):
            for equation in equations:
                if num_done is None or not _exchanges_inside(equation):
                    run(self.values, equation, self._summands)
                else:
                    arrays: list[Any] = [v for v in equation.invars if _is_array(v)]
                    self.values.update(zip(arrays, ordered_after(read(self.values, arrays), num_done), strict=True))
                    run(self.values, equation, self._summands)
                    num_done = after(num_done, read(self.values, equation.outvars))
                self._made.update(equation.outvars)
                self._done.add(id(equation))
        return num_done


def _tie(sides: Sequence[_Run]) -> None:
    """All that either side has made is there before either goes on."""
    waiting = [(side, v) for side in sides for v in side.waiting]
    # See the module: XLA takes it out when the order of the program is made.
    tied = lax.optimization_barrier([side.values[v] for side, v in waiting])
    for (side, v), value in zip(waiting, tied, strict=True):
        side.values[v] = value


def _is_waited(equations: Sequence[core.JaxprEqn], waited: Sequence[Any]) -> list[bool]:
    """[equation] whether it leads to what is waited for, or to a collective."""
    needed = {v for v in waited if isinstance(v, core.Var)}
    leads: list[bool] = []
    for equation in reversed(equations):
        leads.append(_exchanges(equation) or not needed.isdisjoint(equation.outvars))
        if leads[-1]:
            needed.update(v for v in equation.invars if isinstance(v, core.Var))
    return leads[::-1]


def _places(equations: Sequence[core.JaxprEqn], is_waited: Sequence[bool]) -> list[int]:
    """[equation] its phase: the first that it can be in, or the last before somebody reads its results."""
    made_in: dict[Any, int] = {}
    is_late: set[Any] = set()
    first = []
    for equation, waited in zip(equations, is_waited, strict=True):
        read_here = [v for v in equation.invars if isinstance(v, core.Var)]
        place = max((made_in.get(v, 0) for v in read_here), default=0)
        if _exchanges(equation):
            place += place % 2
        elif is_product(equation):
            place += 1 - place % 2
            if not waited and is_late.isdisjoint(read_here):
                place += 2
        if not waited and (is_product(equation) or not is_late.isdisjoint(read_here)):
            is_late.update(equation.outvars)
        made_in.update(dict.fromkeys(equation.outvars, place))
        first.append(place)
    read_in: dict[Any, int] = {}
    places: list[int] = []
    for equation, place in zip(reversed(equations), reversed(first), strict=True):
        last = min([read_in[v] for v in equation.outvars if v in read_in] or [place])
        if _exchanges(equation):
            last -= last % 2
        elif is_product(equation):
            last -= 1 - last % 2
        place = max(place, last)
        read_in.update({v: min(place, read_in.get(v, place)) for v in equation.invars if isinstance(v, core.Var)})
        places.append(place)
    return places[::-1]


def _waves(phase: Phase) -> list[Phase]:
    """The equations of a phase of collectives in parts that follow each other, each with collectives of one kind.

    XLA joins those of a part, and two of other kinds would share what is beside them.
    """
    num_behind: dict[Any, int] = {}
    ranks: list[tuple[int, str]] = []  # of collectives: how many of the phase wait for them, one after the other
    for equation in reversed(phase):
        behind = max((num_behind.get(v, 0) for v in equation.outvars), default=0)
        if _exchanges(equation):
            ranks.append((-behind, equation.primitive.name))
        behind += _exchanges(equation)
        num_behind.update({v: max(behind, num_behind.get(v, 0)) for v in equation.invars if isinstance(v, core.Var)})
    # What others wait for first: sums before gathers of what is read again.
    order = sorted(set(ranks), key=lambda rank: (rank[0], rank[1].startswith("all_gather")))
    waves: list[Phase] = [[] for _ in order or [()]]
    made_in: dict[Any, int] = {}
    for equation in phase:
        place = max((made_in.get(v, 0) for v in equation.invars if isinstance(v, core.Var)), default=0)
        if _exchanges(equation):
            place = order.index(ranks.pop())
        waves[place].append(equation)
        made_in.update(dict.fromkeys(equation.outvars, place))
    return waves


def _around_collectives(wave: Phase) -> tuple[Phase, Phase, Phase]:
    """What is before the collectives of a wave, which do not need each other; these; and what waits for them."""
    made: set[Any] = set()
    before: Phase = []
    at_once: Phase = []
    behind: Phase = []
    for equation in wave:
        is_behind = not made.isdisjoint(v for v in equation.invars if isinstance(v, core.Var))
        (at_once if _exchanges(equation) else behind if is_behind else before).append(equation)
        made.update(equation.outvars if _exchanges(equation) or is_behind else ())
    return before, at_once, behind


def _shares(phase: Phase, weights: Sequence[int]) -> list[Phase]:
    """The equations of a phase of products in as many parts, whose work is as the weights."""
    works = np.cumsum([_work([equation]) for equation in phase])
    wanted = np.cumsum(weights)[:-1] / max(sum(weights), 1)
    # Each part ends with the product that makes it full.
    ends = np.searchsorted(works, wanted * works[-1]) + 1 if phase else np.zeros(len(wanted), int)
    places = [0, *np.minimum(ends, len(phase)).tolist(), len(phase)]
    return [phase[start:end] for start, end in pairwise(places)]


def _work(phase: Phase) -> int:
    """Multiplications of equations, roughly."""
    return sum(map(_work_of, phase))


def _work_of(equation: core.JaxprEqn) -> int:
    inside = [e for jaxpr in core.jaxprs_in_params(equation.params) for e in jaxpr.eqns]
    if inside:
        return equation.params.get("length", 1) * _work(inside)
    if not is_product(equation):
        return 0
    operand, product = (v.aval.shape for v in (equation.invars[0], equation.outvars[0]))  # pyright: ignore
    if equation.primitive.name != "dot_general":
        return operand[-1] * math.prod(product)
    (contracted, _), _ = equation.params["dimension_numbers"]
    return math.prod(operand[dim] for dim in contracted) * math.prod(product)


def _num_bytes(phase: Phase) -> int:
    """Bytes of what collectives bring."""
    made: list[Any] = [v.aval for e in phase if _exchanges(e) for v in e.outvars]
    return sum(aval.size * aval.dtype.itemsize for aval in made)


def _exchanges(equation: core.JaxprEqn) -> bool:
    return equation.primitive.name in COLLECTIVES


def _exchanges_inside(equation: core.JaxprEqn) -> bool:
    inside = [e for jaxpr in core.jaxprs_in_params(equation.params) for e in jaxpr.eqns]
    return _exchanges(equation) or any(map(_exchanges_inside, inside))


def _is_array(v: Any) -> bool:
    """Whether it is a variable of numbers; keys have no arithmetic."""
    return isinstance(v, core.Var) and not jnp.issubdtype(v.aval.dtype, jax.dtypes.prng_key)  # pyright: ignore
