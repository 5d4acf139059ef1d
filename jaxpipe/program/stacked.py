"""Slices of arrays that hold many layers or pages, read and written in place: sums of gradients, copies of weights.

Indices are never negative here, and `jax.lax` is told so. Else JAX adds the size to those that are; where XLA moves
these additions out of a loop one by one, as with one device, it no longer sees that a sum is read and written at one
place, and copies the slice.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from jaxpipe.mesh import PyTree

Index = jax.Array | int


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Storage that nothing reads before it is written; tests fill it with NaN to prove that. On CPUs it is zeros."""
    return lax.empty(shape, dtype)


def at_index(storage: PyTree, index: jax.Array) -> PyTree:
    """What is stored at `index` of the first axis of every array."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, False), storage)


def with_index(storage: PyTree, index: jax.Array, values: PyTree) -> PyTree:
    """Returns `storage` with `values` at `index` of the first axis, in its dtypes."""
    return jax.tree.map(
        lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value.astype(leaf.dtype), index, 0), storage, values
    )


def slice_at(leaf: jax.Array, *at: Index, shape: tuple[int, ...] | None = None) -> jax.Array:
    """`leaf[at]`, or the part of it with which it begins if a `shape` is given; indexed axes are kept, of size one."""
    start = at + (0,) * (leaf.ndim - len(at))
    size = (1,) * len(at) + (leaf.shape[len(at) :] if shape is None else shape)
    return lax.dynamic_slice(leaf, start, size, allow_negative_indices=False)


def with_slice(leaf: jax.Array, value: jax.Array, *at: Index) -> jax.Array:
    """Returns `leaf` with `value`, whose indexed axes are of size one, where `leaf[at]` begins."""
    return lax.dynamic_update_slice(leaf, value, at + (0,) * (leaf.ndim - len(at)), allow_negative_indices=False)


def with_added(leaf: jax.Array, value: jax.Array, *at: Index) -> jax.Array:
    """Returns `leaf` with `value`, which has no indexed axes, added where `leaf[at]` begins.

    The sum has the shape of `leaf`: with one layer the slice is all of `leaf`, and XLA adds in place only if there is
    no reshape in between.
    """
    # Cast to the sum's dtype first: gradients are of the compute dtype, and would round the sum.
    added = slice_at(leaf, *at, shape=value.shape) + value.astype(leaf.dtype)[(None,) * len(at)]
    return with_slice(leaf, added, *at)
