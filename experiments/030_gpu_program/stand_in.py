"""A stand-in for cuDNN's attention, which cannot be compiled without a GPU: the same operands, results and residuals.

Kernels of Triton that nothing can look into take its place, so that what is around them is compiled as around cuDNN's.
They compute nothing of meaning.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

NAME = "attention_stand_in"
_READ = 128  # numbers of each operand that a kernel reads, so that none is dead


def _opaque(outs: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array) -> list[jax.Array]:
    def kernel(*refs: jax.Array) -> None:
        total = jnp.zeros((_READ,), jnp.float32)
        for ref in refs[: len(operands)]:
            total += ref[(0,) * (len(ref.shape) - 1) + (pl.ds(0, _READ),)].astype(jnp.float32)
        for ref in refs[len(operands) :]:
            ref[(0,) * (len(ref.shape) - 1) + (pl.ds(0, _READ),)] = total.astype(ref.dtype)

    options = triton.CompilerParams(num_warps=4, num_stages=1)
    return pl.pallas_call(kernel, out_shape=list(outs), grid=(1,), name=NAME, compiler_params=options)(*operands)


@jax.custom_vjp
def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """An array like the output of attention, [batch, sequence, head, width]."""
    return _forward(q, k, v)[0]


def _forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    batch, length, heads, _ = q.shape
    statistics = jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)
    o, saved = _opaque([jax.ShapeDtypeStruct(q.shape, q.dtype), statistics], q, k, v)
    return o, (q, k, v, saved, o)


def _backward(residuals: tuple[jax.Array, ...], do: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, _, _ = residuals
    return tuple(_opaque([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)], *residuals, do))


attention.defvjp(_forward, _backward)


def dot_product_attention(q: jax.Array, k: jax.Array, v: jax.Array, **options: object) -> jax.Array:
    """Takes the place of `jax.nn.dot_product_attention`."""
    assert options["implementation"] == "cudnn"
    return attention(q, k, v)
