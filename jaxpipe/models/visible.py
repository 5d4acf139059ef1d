"""What a query of attention sees: which keys, said by positions and by a padding mask.

Goes in: whether attention is causal, its window, the microbatch's padding mask. Comes out: a mask for the
scores of a block of queries, made where it is used. A vjp keeps the padding mask as it was given, an array of
the microbatch, which costs nothing; it never keeps a mask that is made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import NamedTuple

import jax
import jax.numpy as jnp


class QueryBlock(NamedTuple):
    """Consecutive queries against consecutive keys, all that one of these queries may see; positions."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int

    @property
    def num_queries(self) -> int:
        """Queries in the block."""
        return self.end_query - self.first_query


@partial(jax.tree_util.register_dataclass, data_fields=["padding_mask"], meta_fields=["causal", "window"])
@dataclass(frozen=True)
class Visible:
    """Which keys a query sees; as a pytree its leaf is the padding mask, the rest is static.

    Attributes:
        causal: none that stand after it.
        window: the last so many, itself included; None: as many as there are. Goes with `causal`.
        padding_mask: int32 "batch key", 1 for a token and 0 for padding, which no query sees; None: all are tokens.
    """

    causal: bool = True
    window: int | None = None
    padding_mask: jax.Array | None = None

    def block(self, first_query: int, end_query: int, *, seq: int, multiple: int = 1) -> QueryBlock:
        """The block of these queries with the keys that they may see.

        Args:
            first_query: position of the first query.
            end_query: position after the last one.
            seq: positions of the whole sequence.
            multiple: of the first key's position.

        Example:
            >>> Visible(window=300).block(512, 768, seq=1024, multiple=128)
            QueryBlock(first_query=512, end_query=768, first_key=128, end_key=768)
        """
        first_key = 0 if self.window is None else max(0, first_query - self.window + 1) // multiple * multiple
        return QueryBlock(first_query, end_query, first_key, end_query if self.causal else seq)

    def mask_scores(self, scores: jax.Array, block: QueryBlock) -> jax.Array:
        """`scores` where the key is seen, else what the softmax makes an exact 0 of.

        With a padding mask that is the least float32: a query that sees no key at all gets numbers without a
        meaning, but no NaN.

        Args:
            scores: float32 "batch kv_head (group query) key".
            block: of these queries and keys.
        """
        key = jnp.arange(block.first_key, block.end_key)
        query = block.first_query + jnp.arange(scores.shape[2]) % block.num_queries
        seen = []
        if self.causal:
            seen.append(query[:, None] >= key)
        if self.window is not None:
            seen.append(query[:, None] - key < self.window)
        if self.padding_mask is not None:
            seen.append(self.padding_mask[:, None, None, block.first_key : block.end_key] != 0)
        if not seen:
            return scores
        unseen = -jnp.inf if self.padding_mask is None else jnp.finfo(jnp.float32).min
        return jnp.where(reduce(and_, seen), scores, unseen)
