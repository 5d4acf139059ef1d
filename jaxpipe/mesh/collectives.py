"""Collectives inside `shard_map`; `deterministic` sums gather the terms and add them in mesh order.

XLA may add the terms of a sum in any order, which depends on how devices and processes are wired. Gathered terms are
added in the same order everywhere and give the same digits, at the price of more traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def sum_over(x: jax.Array, axes: Sequence[str], *, deterministic: bool = False) -> jax.Array:
    """The sum of `x` over all devices of the mesh axes `axes`, on each of these devices (all-reduce)."""
    if not axes:
        return x
    return lax.all_gather(x, tuple(axes)).sum(axis=0) if deterministic else lax.psum(x, tuple(axes))


def scatter_sum_over(x: jax.Array, axes: Sequence[str], dim: int, *, deterministic: bool = False) -> jax.Array:
    """This device's part, along `dim`, of the sum of `x` over the devices of `axes` (reduce-scatter)."""
    axes = tuple(axes)
    if not deterministic:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    size = x.shape[dim] // lax.axis_size(axes)
    return lax.dynamic_slice_in_dim(lax.all_gather(x, axes).sum(axis=0), lax.axis_index(axes) * size, size, dim)


def gather_over(x: jax.Array, axes: Sequence[str], dim: int) -> jax.Array:
    """All parts of `x` along `dim` from the devices of `axes` (all-gather)."""
    return lax.all_gather(x, tuple(axes), axis=dim, tiled=True)


@dataclass(frozen=True)
class TensorAxis:
    """Collectives over the devices that share each layer; with one device they return their argument.

    `gather` and `scatter_sum` are each other's transposes. `sum`, `sum_over_batch` and `max` are for values that no
    gradient passes through, `once` for values that every device computes alike from gathered ones.

    Attributes:
        size: number of devices.
        deterministic: whether sums add in mesh order.
        num_data: number of such groups of devices, which share each microbatch: the mesh's `data`.
    """

    size: int = 1
    deterministic: bool = False
    num_data: int = 1

    @property
    def num_sharing(self) -> int:
        """Devices that share a microbatch in one stage."""
        return self.size * self.num_data

    def index(self) -> jax.Array | int:
        """The index of this device along the axis."""
        return 0 if self.size == 1 else lax.axis_index("tensor")

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """All devices' parts of `x` along `dim`."""
        return x if self.size == 1 else _gather(x, self, dim)

    def scatter_sum(self, x: jax.Array, dim: int) -> jax.Array:
        """This device's part, along `dim`, of the sum of all devices' `x`."""
        return x if self.size == 1 else _scatter_sum(x, self, dim)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of all devices' `x`."""
        return x if self.size == 1 else sum_over(x, ("tensor",), deterministic=self.deterministic)

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """The sum of `x` over all devices that share a microbatch in one stage."""
        axes = [name for name, size in (("data", self.num_data), ("tensor", self.size)) if size > 1]
        return sum_over(x, axes, deterministic=self.deterministic)

    def once(self, x: jax.Array) -> jax.Array:
        """Returns `x`, equal on all devices; only the first passes its gradient on, so that a sum counts it once."""
        return x if self.size == 1 else jnp.where(self.index() == 0, x, lax.stop_gradient(x))

    def max(self, x: jax.Array) -> jax.Array:
        """The largest of all devices' `x`."""
        return x if self.size == 1 else lax.pmax(x, "tensor")


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, tensor: TensorAxis, dim: int) -> jax.Array:
    return gather_over(x, ("tensor",), dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter_sum(x: jax.Array, tensor: TensorAxis, dim: int) -> jax.Array:
    return scatter_sum_over(x, ("tensor",), dim, deterministic=tensor.deterministic)


_gather.defvjp(
    lambda x, tensor, dim: (_gather(x, tensor, dim), None),
    lambda tensor, dim, _, gradient: (_scatter_sum(gradient, tensor, dim),),
)
_scatter_sum.defvjp(
    lambda x, tensor, dim: (_scatter_sum(x, tensor, dim), None),
    lambda tensor, dim, _, gradient: (_gather(gradient, tensor, dim),),
)
