"""The dtypes that follow from a parameter's: of its compute copies, and of the running sum of its gradient."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.mesh import PyTree


def copy_dtype(dtype: Any, wanted: Any) -> Any:
    """The dtype of a parameter's compute copies: `wanted` for floating-point numbers, its own for all else, and None.

    A permutation, a mask or a key in fewer bits would be another one; a complex number would lose its imaginary part.

    Example:
        >>> [str(copy_dtype(jnp.dtype(name), "bfloat16")) for name in ("float32", "int32", "complex64")]
        ['bfloat16', 'int32', 'complex64']
    """
    return wanted if wanted is not None and jnp.issubdtype(dtype, jnp.floating) else dtype


def sum_dtype(dtype: Any) -> Any:
    """The dtype of the sum of a parameter's gradients: complex64 for complex parameters, else float32.

    What is neither real nor complex, as integers and keys, has a gradient of zeros.
    """
    return jnp.complex64 if jnp.issubdtype(dtype, jnp.complexfloating) else jnp.float32


def cast_copy(leaf: jax.Array, wanted: Any) -> jax.Array:
    """`leaf` in the dtype of its compute copies."""
    dtype = copy_dtype(leaf.dtype, wanted)
    return leaf if dtype == leaf.dtype else leaf.astype(dtype)


def masters_of(params: PyTree, is_trained: PyTree | None, wanted: Any) -> PyTree:
    """Parameters in the dtypes in which a train state keeps them; traceable.

    These are float32 whatever a model's `init` returns: small updates would vanish in 16 bits. What is frozen gets
    none, and is kept as it is computed with.

    Args:
        is_trained: of each parameter; None: all are.
        wanted: dtype of the compute copies, or None.
    """

    def master(leaf: jax.Array, is_trained: bool = True) -> jax.Array:
        leaf = leaf.astype(jnp.float32)
        return leaf if is_trained else cast_copy(leaf, wanted)

    return jax.tree.map(master, params) if is_trained is None else jax.tree.map(master, params, is_trained)
