"""Matmuls that a traced function computes, read off its jaxpr.

Goes in: equations. Comes out: every matmul by its sizes; those of a loop as often as it turns, and of branches those
with most FLOPs. What cannot be counted: a loop that ends by a condition counts as one turn, and a kernel as what it
declares (`jaxpipe.mesh.abstract`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax.extend.core as core

from jaxpipe.mesh.abstract import declared_matmuls

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class Matmul:
    """Matmuls of equal sizes, [rows, depth] x [depth, columns].

    Attributes:
        rows, columns, depth: sizes of one matmul.
        num: number of matmuls.
        fused: whether it is part of a kernel that keeps its results on the chip, as in cuDNN's attention.
        summed: whether it adds its result to a float32 array, as that of the head's kernel.
        apart: numbers that it reads or writes while it multiplies nothing: of experts' kernels, of each of which few
            rows have need.
    """

    rows: int
    columns: int
    depth: int
    num: int = 1
    fused: bool = False
    summed: bool = False
    apart: int = 0

    @property
    def flops(self) -> int:
        """FLOPs, a multiplication and an addition counted as two."""
        return 2 * self.num * self.rows * self.columns * self.depth

    def num_bytes(self, itemsize: int) -> int:
        """Bytes read and written, each factor and the result once, in a dtype of `itemsize` bytes."""
        result = 2 * FLOAT32_BYTES if self.summed else itemsize
        return self.num * (itemsize * self.depth * (self.rows + self.columns) + result * self.rows * self.columns)

    @property
    def of_inputs(self) -> Matmul:
        """Matmuls of backward that give the gradient of the left factor."""
        return Matmul(self.rows, self.depth, self.columns, self.num, self.fused)

    @property
    def of_weights(self) -> Matmul:
        """Matmuls of backward that give the gradient of the right factor."""
        return Matmul(self.depth, self.columns, self.rows, self.num, self.fused)

    def resized(self, size: Callable[[int], int]) -> Matmul:
        """The matmuls with other sizes: `size` of each."""
        rows, columns, depth, num = map(size, (self.rows, self.columns, self.depth, self.num))
        return Matmul(rows, columns, depth, num, self.fused, self.summed, self.apart)


def flops(matmuls: Sequence[Matmul]) -> int:
    """FLOPs of all `matmuls` together."""
    return sum(matmul.flops for matmul in matmuls)


def matmuls_of(equations: Sequence[core.JaxprEqn], num: int = 1) -> Iterator[Matmul]:
    """The matmuls of `equations`, each `num` times.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, kernel = jnp.ones((4, 3)), jnp.ones((3, 5))
        >>> def loop(x, kernel):
        ...     return jax.lax.scan(lambda total, _: (total + (x @ kernel).sum(), None), 0.0, length=7)
        >>> list(matmuls_of(jax.make_jaxpr(loop)(x, kernel).eqns))
        [Matmul(rows=4, columns=5, depth=3, num=7, fused=False, summed=False, apart=0)]
    """
    for equation in equations:
        name = equation.primitive.name
        params = equation.params
        if name == "dot_general":
            yield _of_dot(equation, num)
        elif name == "conv_general_dilated":
            yield _of_convolution(equation, num)
        elif name == "pallas_call":
            for rows, columns, depth, number, fused, *apart in declared_matmuls(params):
                yield Matmul(rows, columns, depth, num * number, bool(fused), apart=num * sum(apart))
        elif name == "scan":
            yield from matmuls_of(params["jaxpr"].jaxpr.eqns, num * params["length"])
        elif name == "cond":
            yield from max((list(matmuls_of(branch.jaxpr.eqns, num)) for branch in params["branches"]), key=flops)
        else:
            for inner in core.jaxprs_in_params(params):
                yield from matmuls_of(inner.eqns, num)


def _of_dot(equation: core.JaxprEqn, num: int) -> Matmul:
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    left, right = (atom.aval.shape for atom in equation.invars)  # pyright: ignore[reportAttributeAccessIssue]
    num_batch = math.prod(left[dim] for dim in batch)
    depth = math.prod(left[dim] for dim in contracted)
    # An empty factor has no elements to divide by.
    rows, columns = (math.prod(shape) // max(num_batch * depth, 1) for shape in (left, right))
    return Matmul(rows, columns, depth, num * num_batch)


def _of_convolution(equation: core.JaxprEqn, num: int) -> Matmul:
    """The convolution as a matmul of patches with its kernel; groups share the depth."""
    numbers = equation.params["dimension_numbers"]
    kernel = equation.invars[1].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    out = equation.outvars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]
    columns = out[numbers.out_spec[1]]
    return Matmul(math.prod(out) // columns, columns, math.prod(kernel) // kernel[numbers.rhs_spec[0]], num)
