"""Collectives as local operations of the same shapes, with which one device runs its part of a program alone.

The program is traced as ever, so that shapes, residuals and order are those of a run; only what JAX makes of its
collectives is replaced, in the whole process. Results have no meaning, but are finite and reproducible: gathers repeat
what the device has, sums and maxima return it, a scattered sum is the first part of it. Left to others: devices that
are not there (`mocked`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

PLATFORMS = ("cpu", "gpu")
_replaced: set[core.Primitive] = set()


def make_collectives_local() -> None:
    """Replaces the collectives of every program that this process lowers from now on."""
    for primitive, operation in _operations().items():
        _replaced.add(primitive)
        rule = _rule(operation, multiple_results=primitive.multiple_results)
        # By platform, since a rule for all platforms would lose to JAX's own of one.
        for platform in PLATFORMS:
            mlir.register_lowering(primitive, rule, platform=platform)


def collectives_are_local() -> bool:
    """Whether this process has called `make_collectives_local`."""
    return bool(_replaced)


def received(x: jax.Array) -> jax.Array:
    """The array that a permute brings: half of the sent one, and small numbers that differ from element to element.

    A device that is neither first nor last would else pass on the zeros that it begins with, and a GPU multiplies zeros
    at another clock rate. The half keeps what goes around from growing. Integers and truth values stay as they are.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    index = lax.iota(jnp.uint32, math.prod(x.shape)).reshape(x.shape)
    # 2^32 over the golden ratio: multiples of it, modulo 2^32, spread evenly.
    spread = (index * jnp.uint32(2654435769)).astype(jnp.float32) * 2.0**-32 - 0.5  # multiples of the golden ratio
    return (x.astype(jnp.float32) * 0.5 + spread / 32).astype(x.dtype)


def _rule(operation: Callable[..., jax.Array], *, multiple_results: bool) -> Callable[..., Any]:
    """The lowering of a collective by `operation`, of its operand and the shape of its result."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        def local(*arrays: jax.Array, **params: Any) -> Any:
            results = [operation(x, like.shape, **params) for x, like in zip(arrays, ctx.avals_out, strict=True)]
            # The compiler does not look into a collective, nor through a barrier.
            return lax.optimization_barrier(results if multiple_results else results[0])

        return mlir.lower_fun(local, multiple_results=multiple_results)(ctx, *operands, **params)

    return lower


def _operations() -> dict[core.Primitive, Callable[..., jax.Array]]:
    """The collectives' primitives, and what replaces each; named arguments are the parameters of the primitive."""
    return {
        lax.psum_p: lambda x, shape, **_: x,
        lax.pmax_p: lambda x, shape, **_: x,
        lax.ppermute_p: lambda x, shape, **_: received(x),
        lax.all_gather_p: _gathered,
        lax.all_to_all_p: _exchanged,
        _scatter_primitive(): _scattered,
    }


def _gathered(x: jax.Array, shape: Sequence[int], *, all_gather_dimension: int, tiled: bool, **_: Any) -> jax.Array:
    if not tiled:
        x = jnp.expand_dims(x, all_gather_dimension)
    num_parts = shape[all_gather_dimension] // x.shape[all_gather_dimension]
    return jnp.concatenate([x] * num_parts, all_gather_dimension)


def _scattered(x: jax.Array, shape: Sequence[int], *, scatter_dimension: int, tiled: bool, **_: Any) -> jax.Array:
    size = shape[scatter_dimension] if tiled else 1
    return lax.slice_in_dim(x, 0, size, axis=scatter_dimension).reshape(shape)


def _exchanged(
    x: jax.Array, shape: Sequence[int], *, split_axis: int, concat_axis: int, tiled: bool, **_: Any
) -> jax.Array:
    if not tiled:
        return jnp.moveaxis(x, split_axis, concat_axis)
    if split_axis == concat_axis:
        return x
    num_parts = x.shape[split_axis] // shape[split_axis]
    return jnp.concatenate(jnp.split(x, num_parts, split_axis), concat_axis)


def _scatter_primitive() -> core.Primitive:
    """The primitive of `lax.psum_scatter`, which has no public name."""
    mesh = AbstractMesh((2,), ("axis",))
    scatter = jax.shard_map(
        lambda x: lax.psum_scatter(x, "axis", tiled=True), mesh=mesh, in_specs=P(), out_specs=P("axis"), check_vma=False
    )
    (mapped,) = jax.make_jaxpr(scatter)(jax.ShapeDtypeStruct((2,), jnp.float32)).eqns
    return mapped.params["jaxpr"].eqns[0].primitive
