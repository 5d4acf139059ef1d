"""Collectives inside `shard_map`, and sums on a device; `deterministic` sums add gathered terms in mesh order.

XLA may add the terms of a sum in any order, which depends on how devices and processes are wired. Gathered terms are
added in the same order everywhere and give the same digits, at the price of more traffic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh.trained import is_masked


def added(sums: Any, terms: Any) -> Any:
    """A tree of running sums with one of terms added, in the dtypes of the sums; frozen parameters have no sum."""

    # Sums are float32; terms may come in the compute dtype.
    def with_term(total: Any, term: Any) -> Any:
        return total if is_masked(total) else total + term.astype(total.dtype)

    return jax.tree.map(with_term, sums, terms, is_leaf=is_masked)


def only_on_the_first(values: Any, axis: str) -> Any:
    """A tree of values, equal on all devices of `axis`, on the first of them, and zeros on the others."""
    # Zeros on the others, so that a sum over the axis counts the value once.
    return jax.tree.map(lambda leaf: jnp.where(lax.axis_index(axis) == 0, leaf, 0), values)


MEASURED = "measured_"  # begins the names of sums of a layer that are told beside losses, and are no part of the loss


def with_losses(result: Any) -> tuple[Any, dict[str, Any]]:
    """The x that a layer or its part returns, and its sums of losses by name; none if it returns x alone."""
    # x may itself be a tuple of two, but no layer's x is a dict.
    has_losses = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    return result if has_losses else (result, {})


def sum_over(x: jax.Array, axes: Sequence[str], *, deterministic: bool = False) -> jax.Array:
    """The sum of `x` over all devices of the mesh axes `axes`, on each of these devices (all-reduce)."""
    # An all-reduce over no axis would still be an operation in the program.
    if not axes:
        return x
    # A psum may add in any order; a gather brings the terms in mesh order, and each device adds them alike.
    return lax.all_gather(x, tuple(axes)).sum(axis=0) if deterministic else lax.psum(x, tuple(axes))


def scatter_sum_over(x: jax.Array, axes: Sequence[str], dim: int, *, deterministic: bool = False) -> jax.Array:
    """This device's part, along `dim`, of the sum of `x` over the devices of `axes` (reduce-scatter)."""
    axes = tuple(axes)
    if not deterministic:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    size = x.shape[dim] // lax.axis_size(axes)
    # As above: gathered, summed in mesh order, and then this device's part is cut out.
    return lax.dynamic_slice_in_dim(lax.all_gather(x, axes).sum(axis=0), lax.axis_index(axes) * size, size, dim)


def gather_over(x: jax.Array, axes: Sequence[str], dim: int) -> jax.Array:
    """All parts of `x` along `dim` from the devices of `axes` (all-gather)."""
    return lax.all_gather(x, tuple(axes), axis=dim, tiled=True)


@dataclass(frozen=True)
class Axis:
    """Collectives over the devices along one axis of the mesh; with one device they return their argument.

    `gather` and `scatter_sum` are each other's transposes, and `exchange` is its own. `sum` and `max` are for values
    that no gradient passes through, `once` for values that every device computes alike from gathered ones. In the
    compiled program the first three have the scope `layer_over_` and the name of the axis.
    """

    name: str
    size: int = 1
    deterministic: bool = False  # whether sums add in mesh order

    def index(self) -> jax.Array | int:
        """The index of this device along the axis."""
        # A Python 0: outside of `shard_map` there is no axis to ask.
        return 0 if self.size == 1 else lax.axis_index(self.name)

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """All devices' parts of `x` along `dim`."""
        return x if self.size == 1 else _gather(x, self, dim)

    def part(self, x: jax.Array, dim: int) -> jax.Array:
        """This device's part of `x` along `dim`: the inverse of `gather`."""
        size = x.shape[dim] // self.size
        return x if self.size == 1 else lax.dynamic_slice_in_dim(x, self.index() * size, size, dim)

    def scatter_sum(self, x: jax.Array, dim: int) -> jax.Array:
        """This device's part, along `dim`, of the sum of all devices' `x`."""
        return x if self.size == 1 else _scatter_sum(x, self, dim)

    def exchange(self, x: jax.Array) -> jax.Array:
        """The parts that all devices have for this one (all-to-all): `x` and the result are "device ..."."""
        return x if self.size == 1 else _exchange(x, self)

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of all devices' `x`."""
        return x if self.size == 1 else sum_over(x, (self.name,), deterministic=self.deterministic)

    def once(self, x: jax.Array) -> jax.Array:
        """Returns `x`, equal on all devices; only the first passes its gradient on, so that a sum counts it once."""
        # The values are equal, so that `where` changes none; only gradients differ.
        return x if self.size == 1 else jnp.where(self.index() == 0, x, lax.stop_gradient(x))

    def max(self, x: jax.Array) -> jax.Array:
        """The largest of all devices' `x`."""
        return x if self.size == 1 else lax.pmax(x, self.name)


def _scope(axis: Axis) -> Any:
    return jax.named_scope(f"layer_over_{axis.name}")


def _exchange(x: jax.Array, axis: Axis) -> jax.Array:
    with _scope(axis):
        return lax.all_to_all(x, axis.name, 0, 0)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    with _scope(axis):
        return gather_over(x, (axis.name,), dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _scatter_sum(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    with _scope(axis):
        return scatter_sum_over(x, (axis.name,), dim, deterministic=axis.deterministic)


_gather.defvjp(
    # JAX's own transposes would lose the scope and, if deterministic, the order of sums.
    lambda x, axis, dim: (_gather(x, axis, dim), None),
    lambda axis, dim, _, gradient: (_scatter_sum(gradient, axis, dim),),
)
_scatter_sum.defvjp(
    lambda x, axis, dim: (_scatter_sum(x, axis, dim), None),
    lambda axis, dim, _, gradient: (_gather(gradient, axis, dim),),
)
