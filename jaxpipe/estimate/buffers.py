"""Memory that a traced function takes while it runs, and the bytes that its kernels move, read off its jaxpr.

Goes in: equations without calls. Comes out: estimates, since XLA decides what it fuses and in which order it runs. They
assume that elementwise equations are fused into what reads them; that what a product, a loop or foreign code reads lies
in memory, as does what they and reductions return; and that all runs in order, each value as late as possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as core

from jaxpipe.estimate.products import Matmul, matmuls_of
from jaxpipe.program.jaxprs import num_consts_and_carry
from jaxpipe.program.primitives import COLLECTIVES, FORMS
from jaxpipe.program.split_vjp.cut import is_product

# Kernels besides products, with results of their own; each fuses with the elementwise equations before it.
_KERNELS = ("reduce", "scatter", "arg", "cum", "sort", "concatenate", "dynamic_update", "top_k", "select_and")


@dataclass(frozen=True)
class TracedPart:
    """What a part of an action takes, as its jaxpr shows it.

    Attributes:
        matmuls: its matmuls.
        num_bytes: bytes that all other kernels read and write.
        num_kernels: how many kernels run, matmuls included.
        most_bytes: bytes of what it makes, at the fullest moment; its inputs, and sums that it adds to, do not count.
    """

    matmuls: tuple[Matmul, ...]
    num_bytes: int
    num_kernels: int
    most_bytes: int


def traced_part(
    equations: Sequence[core.JaxprEqn], outs: Iterable[Any], sums: Iterable[Any] = (), pages: Iterable[Any] = ()
) -> TracedPart:
    """What `equations` take.

    Args:
        equations: equations without calls, in their order.
        outs: values that stay in memory until the end.
        sums: values that are added in place to sums given to it.
        pages: inputs that stand in pages, and are copied from them unless they are fused.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, kernel = jnp.ones((4, 256)), jnp.ones((256, 256))
        >>> jaxpr = jax.make_jaxpr(lambda x, kernel: jnp.tanh(jnp.sin(x) @ kernel) + 1)(x, kernel).jaxpr
        >>> part = traced_part(jaxpr.eqns, jaxpr.outvars)  # sin, the product, tanh + 1: 4 KiB each
        >>> part.num_kernels, part.num_bytes, part.most_bytes
        (3, 16384, 8192)
    """
    walk = _Walk(equations, pages)
    for turn, equation in enumerate(equations):
        walk.run(turn, equation)
    for out in sums:
        walk.fuse(len(equations), [out], writes=out)
    for out in outs:
        walk.read(len(equations), out)
    return TracedPart(tuple(matmuls_of(equations)), walk.num_bytes, walk.num_kernels, walk.most_bytes())


class _Walk:
    """The values of a jaxpr as far as they lie in memory: from which turn to which."""

    def __init__(self, equations: Sequence[core.JaxprEqn], pages: Iterable[Any]):
        self._pages = set(pages)
        self.maker = {out: equation for equation in equations for out in equation.outvars}
        self.num_bytes = 0
        self.num_kernels = 0
        self._first: dict[core.Var, int] = {}  # value in memory -> its first turn
        self._last: dict[core.Var, int] = {}
        self._inner: dict[int, int] = defaultdict(int)  # turn -> bytes within a loop or branch
        self._in_place: set[core.Var] = set()

    def run(self, turn: int, equation: core.JaxprEqn) -> None:
        """Takes account of one equation, unless another one will fuse it."""
        if not _is_kernel(equation):
            return
        read = [atom for atom in equation.invars if isinstance(atom, core.Var)]
        if is_product(equation):
            for value in read:
                self.read(turn, value)
            # What is within a kernel is on the chip.
            bodies = core.jaxprs_in_params(equation.params) if equation.primitive.name != "pallas_call" else ()
            parts = [traced_part(body.eqns, body.outvars) for body in bodies]
            times = equation.params.get("length", 1)
            self._inner[turn] = max((part.most_bytes for part in parts), default=0)
            self.num_bytes += times * max((part.num_bytes for part in parts), default=0)
            self.num_kernels += times * max((part.num_kernels for part in parts), default=1)
        else:
            self.fuse(turn, read)
            self.num_bytes += sum(map(_bytes, equation.outvars))
        for place, out in enumerate(equation.outvars):
            # A loop's carry is updated where it came in, if nothing else made it here.
            carried = _carried(equation, place)
            if isinstance(carried, core.Var) and carried not in self.maker:
                self._in_place.add(out)
            self._hold(out, turn)

    def read(self, turn: int, value: Any) -> None:
        """A value is read as it lies in memory: a fused one is made now."""
        value = self._form_of(value)
        if not isinstance(value, core.Var) or (value not in self.maker and value not in self._pages):
            return
        if value not in self._first:
            self.fuse(turn, [value], writes=value)
        self._hold(value, turn)

    def fuse(self, turn: int, values: Sequence[Any], *, writes: Any = None) -> None:
        """A kernel computes `values` from what lies in memory, and writes one of them or nothing."""
        sources: set[core.Var] = set()
        waiting = [value for value in values if isinstance(value, core.Var)]
        while waiting:
            value = waiting.pop()
            if value in sources:
                continue
            if value in self._first or value not in self.maker:
                sources.add(value)
            else:
                waiting += [atom for atom in self.maker[value].invars if isinstance(atom, core.Var)]
        for source in sources & self._first.keys():
            self._hold(source, turn)
        self.num_kernels += 1
        self.num_bytes += sum(map(_bytes, sources)) + (_bytes(writes) if writes is not None else 0)

    def most_bytes(self) -> int:
        """Bytes at the fullest turn."""
        change: dict[int, int] = defaultdict(int)
        for value, first in self._first.items():
            if value not in self._in_place:
                change[first] += _bytes(value)
                change[self._last[value] + 1] -= _bytes(value)
        most = held = 0
        for turn in sorted({*change, *self._inner}):
            held += change[turn]
            most = max(most, held + self._inner.get(turn, 0))
        return most

    def _hold(self, value: core.Var, turn: int) -> None:
        self._first.setdefault(value, turn)
        self._last[value] = max(turn, self._last.get(value, turn))

    def _form_of(self, value: Any) -> Any:
        while isinstance(value, core.Var) and value not in self._first and value in self.maker:
            maker = self.maker[value]
            if maker.primitive.name not in FORMS:
                break
            value = maker.invars[0]
        return value


def _is_kernel(equation: core.JaxprEqn) -> bool:
    name = equation.primitive.name
    return name in COLLECTIVES or name.startswith(_KERNELS) or is_product(equation)


def _carried(equation: core.JaxprEqn, place: int) -> Any:
    """What comes in as the carry that a scan returns at `place`; None if there is none."""
    if equation.primitive.name != "scan":
        return None
    num_consts, num_carry = num_consts_and_carry(equation.params)
    return equation.invars[num_consts + place] if place < num_carry else None


def _bytes(value: Any) -> int:
    dtype = value.aval.dtype
    # Random keys are no numbers for numpy, and few.
    return 0 if jax.numpy.issubdtype(dtype, jax.dtypes.prng_key) else value.aval.size * dtype.itemsize
