"""The keys and values of the tokens so far, so that each further token costs one column of attention.

For sampling, on one device: nothing here is differentiated, and rows of a batch are equally long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models.attention_blocks import from_matrices, to_matrices


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "num_tokens", "layer"], meta_fields=[])
@dataclass(frozen=True)
class Cache:
    """The keys and values of all layers, and the layer that is next.

    Attributes:
        keys: "layer batch kv_head size head_dim", with norm and rotation; those after the newest token are not read.
        values: of the same shape.
        num_tokens: int32, the tokens whose logits are known, the same in all rows.
        layer: int32, the layer that reads and writes.
    """

    keys: jax.Array
    values: jax.Array
    num_tokens: jax.Array
    layer: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> Cache:
        """A cache of no tokens: keys and values of `shape`."""
        # Four arrays of their own, since a program that they are given to may write over each.
        return cls(*(jnp.zeros(shape, dtype) for _ in range(2)), *(jnp.zeros((), jnp.int32) for _ in range(2)))

    def followed_by(self, key: jax.Array, value: jax.Array) -> Cache:
        """The cache with the layer's keys and values of further tokens, each "batch token kv_head head_dim"."""

        def written(kept: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(
                kept, new.astype(kept.dtype).transpose(0, 2, 1, 3)[None], (self.layer, 0, 0, self.num_tokens, 0)
            )

        return replace(self, keys=written(self.keys, key), values=written(self.values, value))

    def attend(self, query: jax.Array, *, window: int | None) -> jax.Array:
        """Attended values "batch query head head_dim" of the further tokens, whose keys and values are in the cache.

        Args:
            query: "batch query head head_dim".
            window: number of last keys that a query sees, itself included; None: all.
        """
        keys, values = (lax.dynamic_index_in_dim(kept, self.layer, keepdims=False) for kept in (self.keys, self.values))
        num_queries, size = query.shape[1], keys.shape[2]
        scores = jnp.einsum("bhqd,bhkd->bhqk", to_matrices(query, keys.shape[1]), keys).astype(jnp.float32)
        place = self.num_tokens + jnp.arange(scores.shape[2]) % num_queries
        before = place[:, None] - jnp.arange(size)  # how far a key is before a query
        is_seen = (before >= 0) & (before < (window or size))
        scores = jnp.where(is_seen, scores * query.shape[-1] ** -0.5, -jnp.inf)
        attended = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1).astype(values.dtype), values)
        return from_matrices(attended, num_queries)
