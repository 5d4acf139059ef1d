"""Order by data: what waits for arrays that it does not compute with, so that collectives run one after the other.

On CPUs, collectives that nothing orders may run at once on a device, as soon as one of them is in a loop: see
`jaxpipe.program.in_place`.
"""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh.on_devices import PyTree

Arrays = TypeVar("Arrays")


def after(num_done: jax.Array, values: PyTree) -> jax.Array:
    """Returns `num_done`, which now depends on every array in `values`; what waits for it waits for them.

    One number of each is read. A barrier would not do: XLA takes barriers out before it orders what it executes.
    """
    for value in jax.tree.leaves(values):
        # Nothing is computed with what the host's memory has, and no collective brings it.
        if jax.typeof(value).memory_space == jax.memory.Space.Host:
            continue
        # Keys have no arithmetic; their words do.
        value = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        # An empty array has no number to read, and there is nothing to wait for.
        if value.size:
            first = jnp.real(value).ravel()[:1].astype(jnp.float32)
            # At least 2 ** 30, which `num_done` never reaches: the smaller of both is `num_done`, and XLA cannot know.
            large = lax.bitcast_convert_type(first, jnp.int32) & (2**30 - 1) | 2**30
            num_done = jnp.minimum(num_done, large[0])
    return num_done


def ordered_after(values: Arrays, num_done: jax.Array) -> Arrays:
    """Returns a tree of arrays, each of which now waits for `num_done`, without a copy of any.

    Its first number is written where it stands. A `where` for whole arrays would make all of them anew, and hold an
    array of zeros as large as each from the beginning of the step on.
    """

    def wait(leaf: jax.Array) -> jax.Array:
        if not leaf.ndim:
            return jnp.where(num_done >= 0, leaf, jnp.zeros_like(leaf))
        # An empty array has no number to write, and nothing to send either.
        if not leaf.size:
            return leaf
        # The index is 0, which the compiler cannot know: it would leave out what writes a number where it was read.
        index = (jnp.minimum(num_done, 0), *[jnp.int32(0)] * (leaf.ndim - 1))
        return lax.dynamic_update_slice(leaf, lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim), index)

    return jax.tree.map(wait, values)
