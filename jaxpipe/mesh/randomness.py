"""Random numbers that depend on step, microbatch, layer and global index, never on mesh or schedule."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Randomness(NamedTuple):
    """The random state that a model's function draws from; each draw folds in its own site and global index."""

    key: jax.Array  # uint32[2]: threefry key of a step; folded with microbatch and layer when a layer gets it
    first_sequence: jax.Array  # int32: the index in the microbatch of this device's first sequence

    @classmethod
    def like(cls) -> Randomness:
        """The shapes and dtypes of a `Randomness`, for abstract tracing."""
        return jax.eval_shape(lambda: cls(jnp.zeros(2, jnp.uint32), jnp.zeros((), jnp.int32)))

    def at(self, microbatch: jax.Array | int, layer: jax.Array | int) -> Randomness:
        """The random state of one layer for one microbatch; the embedding counts as layer -1."""
        key = jax.random.wrap_key_data(self.key, impl="threefry2x32")
        for number in (microbatch, jnp.asarray(layer, jnp.int32) + 1):
            key = jax.random.fold_in(key, number)
        return self._replace(key=jax.random.key_data(key))
