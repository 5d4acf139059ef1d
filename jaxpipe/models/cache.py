"""The keys and values of the tokens so far, so that each further token costs one column of attention.

For sampling, on one device: nothing here is differentiated, and rows of a batch are equally long.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models.attention_blocks import from_matrices, to_matrices


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "num_tokens"], meta_fields=[])
@dataclass(frozen=True)
class Cache:
    """The keys and values of a layer.

    Attributes:
        keys: "batch size kv_head head_dim", with norm and rotation; what follows the first `num_tokens` is not read.
        values: of the same shape.
        num_tokens: int32, the tokens so far, the same in all rows.
    """

    keys: jax.Array
    values: jax.Array
    num_tokens: jax.Array

    def followed_by(self, key: jax.Array, value: jax.Array) -> Cache:
        """The cache with the keys and values of further tokens, each "batch token kv_head head_dim"."""
        at = (0, self.num_tokens, 0, 0)
        return Cache(
            lax.dynamic_update_slice(self.keys, key.astype(self.keys.dtype), at),
            lax.dynamic_update_slice(self.values, value.astype(self.values.dtype), at),
            self.num_tokens + key.shape[1],
        )

    def attend(self, query: jax.Array, *, window: int | None) -> jax.Array:
        """Attended values "batch query head head_dim" of the last queries, those of the newest tokens.

        Args:
            query: "batch query head head_dim".
            window: number of last keys that a query sees, itself included; None: all.
        """
        num_queries, num_kv_heads = query.shape[1], self.keys.shape[2]
        keys, values = to_matrices(self.keys, num_kv_heads), to_matrices(self.values, num_kv_heads)
        scores = jnp.einsum("bhqd,bhkd->bhqk", to_matrices(query, num_kv_heads), keys).astype(jnp.float32)
        place = self.num_tokens - num_queries + jnp.arange(scores.shape[2]) % num_queries
        before = place[:, None] - jnp.arange(keys.shape[2])  # how far a key is before a query
        is_seen = (before >= 0) & (before < (window or keys.shape[2]))
        scores = jnp.where(is_seen, scores * query.shape[-1] ** -0.5, -jnp.inf)
        attended = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1).astype(values.dtype), values)
        return from_matrices(attended, num_queries)
