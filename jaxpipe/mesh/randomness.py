"""Random numbers that depend on step, microbatch, layer and global index, never on mesh or schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import CompileError

_IMPL = "threefry2x32"  # whatever jax_default_prng_impl says: masks are the same on every mesh, and drawn in kernels


def key_of(seed: int | jax.Array | np.ndarray) -> jax.Array:
    """The key that a run's initial values, dropout masks or sampled tokens are drawn from."""
    return jax.random.key(seed, impl=_IMPL)


@partial(jax.tree_util.register_dataclass, data_fields=["words", "first_sequence"], meta_fields=[])
@dataclass(frozen=True)
class Randomness:
    """The random state that a model's function draws from; each draw folds in its own site and global index.

    All devices that compute a layer for parts of one microbatch have the same words: a draw from them alone would be
    the same for every part. So draw with `keys`, which are of global sequences, or with
    `jaxpipe.models.dropout.dropout`.

    Attributes:
        words: uint32[2]: threefry key of a step; folded with microbatch and layer when a layer gets it.
        first_sequence: int32: the index in the microbatch of this device's first sequence.
    """

    words: jax.Array
    first_sequence: jax.Array

    @classmethod
    def like(cls) -> Randomness:
        """The shapes and dtypes of a `Randomness`, for abstract tracing."""
        return jax.eval_shape(lambda: cls(jnp.zeros(2, jnp.uint32), jnp.zeros((), jnp.int32)))

    def at(self, microbatch: jax.Array | int, layer: jax.Array | int) -> Randomness:
        """The random state of one layer for one microbatch; the embedding counts as layer -1."""
        key = jax.random.wrap_key_data(self.words, impl=_IMPL)
        # + 1: fold_in takes no negative number, and the embedding is layer -1.
        for number in (microbatch, jnp.asarray(layer, jnp.int32) + 1):
            key = jax.random.fold_in(key, number)
        # Words, not a typed key: they go through loops and permutes as plain arrays.
        return replace(self, words=jax.random.key_data(key))

    def keys(self, num_sequences: int, *, site: int = 0) -> jax.Array:
        """A key for each of this device's sequences, "sequence", for `jax.random` under `jax.vmap`.

        A sequence has the same key on every mesh.

        Args:
            num_sequences: sequences of the microbatch on this device: the first dim of the layer's input.
            site: number of this draw; two draws of one layer have two sites.

        Example:
            >>> random = Randomness(jnp.array([3, 7], jnp.uint32), jnp.int32(4))
            >>> masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(random.keys(2))
            >>> masks.shape, bool((masks[0] == masks[1]).all())
            ((2, 8), False)
        """
        key = jax.random.fold_in(jax.random.wrap_key_data(self.words, impl=_IMPL), site)
        # By global index: a sequence has its key wherever the mesh puts it.
        return jax.vmap(partial(jax.random.fold_in, key))(self.first_sequence + jnp.arange(num_sequences))

    # `jax.random.bernoulli(random.key, shape)` would repeat its draws in every part of a microbatch, so both of these
    # raise.

    @property
    def key(self) -> NoReturn:
        """Raises CompileError: one key for a microbatch is a mistake."""
        raise _no_single_key("random.key")

    @property
    def __jax_array__(self) -> NoReturn:
        """Raises CompileError: `jax.random` looks for it when it is given a `Randomness` as a key."""
        raise _no_single_key("random")


def _no_single_key(what: str) -> CompileError:
    return CompileError(
        f"{what} is used as a key",
        rule="key-of-a-sequence: a microbatch is split over devices, which all have the same `random`; one key for"
        " all would draw the same numbers for every part of it",
        picture="x = jaxpipe.models.dropout.dropout(x, random, rate=0.1)\n"
        "masks = jax.vmap(lambda key: jax.random.bernoulli(key, 0.9, shape))(random.keys(len(x)))",
        repair="draw as in one of these lines",
    )
