"""A block of attention: consecutive queries against the keys that they may see.

`Visible` has the arrays of the microbatch that decide which keys a query sees; a mask for the scores of a block is made
where it is used. A vjp keeps these arrays as they were given, which costs nothing; it never keeps a mask made from
them. The rest is common to all attention functions: heads as matrices, scores, dropout,
and the gradients of a block. There every array is a matrix for each sequence and key-value head: the queries of a group
of heads stand one below the other, "batch kv_head (group query) head_dim", so that keys and values are never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpipe.mesh import ContextAxis
from jaxpipe.mesh.randomness import Randomness
from jaxpipe.models.dropout import Offset, Site, keep, keep_mask, value_of

_ONE_DEVICE = ContextAxis()
KEPT = "kept by attention"  # name of the arrays that backward needs besides queries, keys and values


class QueryBlock(NamedTuple):
    """Positions of consecutive queries, and of all keys that any of them may see."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int

    @property
    def num_queries(self) -> int:
        """Queries in the block."""
        return self.end_query - self.first_query


class Tile(NamedTuple):
    """Where the scores of a tile stand among all, of positions that are known when the program runs."""

    first_query: jax.Array
    first_key: jax.Array
    num_queries: int


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["padding_mask", "positions"],
    meta_fields=["causal", "window", "context"],
)
@dataclass(frozen=True)
class Visible:
    """The keys that a query sees; as a pytree its leaves are the arrays, the rest is static."""

    causal: bool = True  # whether a query sees no keys after it
    window: int | None = None  # number of last keys that a query sees, itself included; None: all. Requires `causal`
    # Int32 "batch key", 1 for a token and 0 for padding, which no query sees; None: all are tokens.
    padding_mask: jax.Array | None = None
    # Int32 "batch seq", the position of each token in its document. A row is documents back to back, and a query sees
    # the keys of its own document; None: a row is one document.
    positions: jax.Array | None = None
    # The devices that split a sequence; the two arrays are of whole sequences on each of them.
    context: ContextAxis = _ONE_DEVICE

    @property
    def document_starts(self) -> jax.Array:
        """Where in its row the document of each token begins, "batch seq"; equal for the tokens of one document."""
        assert self.positions is not None
        return jnp.arange(self.positions.shape[1]) - self.positions

    def block(self, first_query: int, end_query: int, *, seq: int, multiple: int = 1) -> QueryBlock:
        """The block of these queries with the keys that they may see.

        Args:
            multiple: the first key's position is a multiple of this.

        Example:
            >>> Visible(window=300).block(512, 768, seq=1024, multiple=128)
            QueryBlock(first_query=512, end_query=768, first_key=128, end_key=768)
        """
        # + 1: the query's own key is one of the window's. Rounded down, so that blocks of keys begin where matmuls
        # have tiles.
        first_key = 0 if self.window is None else max(0, first_query - self.window + 1) // multiple * multiple
        return QueryBlock(first_query, end_query, first_key, end_query if self.causal else seq)

    def mask_scores(self, scores: jax.Array, block: QueryBlock) -> jax.Array:
        """Returns `scores` where the key is seen, else a value that the softmax turns into an exact 0.

        With a padding mask that is the least float32: a query that sees no key at all gets meaningless numbers, but no
        NaN.

        Args:
            scores: float32 "batch kv_head (group query) key".
        """
        key = jnp.arange(block.first_key, block.end_key)
        # Queries of a group stand one below the other, so positions repeat every `num_queries` rows.
        query = block.first_query + jnp.arange(scores.shape[2]) % block.num_queries
        seen = []
        if self.causal:
            seen.append(query[:, None] >= key)
        if self.window is not None:
            # The minimum changes no mask, and keeps a very large window within int32.
            seen.append(query[:, None] - key < min(self.window, block.end_query))
        if self.padding_mask is not None:
            seen.append(self.padding_mask[:, None, None, block.first_key : block.end_key] != 0)
        if self.positions is not None:
            starts = self.document_starts
            # Once for each head of the group, in the order of the rows.
            of_query = jnp.tile(starts[:, block.first_query : block.end_query], scores.shape[2] // block.num_queries)
            seen.append((of_query[:, :, None] == starts[:, None, block.first_key : block.end_key])[:, None])
        if not seen:
            return scores
        # A row of -inf alone is NaN in the softmax. Only padding can make one: else every query sees its own key.
        unseen = -jnp.inf if self.padding_mask is None else jnp.finfo(jnp.float32).min
        return jnp.where(reduce(and_, seen), scores, unseen)


# ---- Scores, dropout and gradients of a block


@jax.tree_util.register_pytree_node_class
class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities; as a pytree its leaves are its arrays, the rest is static."""

    random: Randomness
    rate: float  # the probability to drop, 0 <= rate < 1
    first_head: Offset  # the global index of this device's first head
    num_heads: int  # of all devices

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[Any, ...]]:
        """Returns the arrays, and what is static."""
        # An array must be a leaf; a number or a function must not, since JAX would trace the one and reject the
        # other.
        is_array = isinstance(self.first_head, jax.Array)
        return (self.random, self.first_head if is_array else None), (
            self.rate,
            None if is_array else self.first_head,
            self.num_heads,
        )

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], arrays: tuple[Any, Any]) -> AttentionDropout:
        """Inverse of `tree_flatten`."""
        rate, first_head, num_heads = static
        return cls(arrays[0], rate, arrays[1] if first_head is None else first_head, num_heads)


def to_matrices(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """Returns queries, keys or values "batch query head head_dim" as "batch kv_head (group query) head_dim"."""
    batch, num_queries, num_heads, head_dim = x.shape
    split = x.reshape(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    return split.transpose(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, head_dim)


def from_matrices(x: jax.Array, num_queries: int) -> jax.Array:
    """Returns matrices "batch kv_head (group query) head_dim" as "batch query head head_dim"."""
    batch, num_kv_heads, _, head_dim = x.shape
    split = x.reshape(batch, num_kv_heads, -1, num_queries, head_dim)
    return split.transpose(0, 3, 1, 2, 4).reshape(batch, num_queries, -1, head_dim)


def with_sinks(output: jax.Array, log_sum: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Attended values and log-sum-exps of softmaxes that have a further term, the exponential of a head's sink.

    The term stands for a key whose value is zero, so that probabilities of keys add up to less than 1.

    Args:
        output: "batch query head head_dim", of softmaxes without it.
        log_sum: "batch kv_head group query", float32, likewise.
        sinks: "head"; None: there are none, and all stays as it is.

    Source: gpt-oss model card, 2025 (arXiv 2508.10925), section 2.2; Xiao et al., Efficient Streaming Language Models
    with Attention Sinks, ICLR 2024.
    """
    if sinks is None:
        return output, log_sum
    with_term = jnp.logaddexp(log_sum, _by_query(sinks, log_sum))
    part_kept = _of_heads(jnp.exp(log_sum - with_term))
    return (output.astype(jnp.float32) * part_kept[..., None]).astype(output.dtype), with_term


def sink_gradients(
    sinks: jax.Array | None, output: jax.Array, log_sum: jax.Array, d_output: jax.Array
) -> jax.Array | None:
    """Gradients of sinks, from results of `with_sinks`; the others follow from these as if there were no sinks."""
    if sinks is None:
        return None
    dot = (output.astype(jnp.float32) * d_output.astype(jnp.float32)).sum(axis=-1)
    # As of a key with probability p and value zero: p (0 - sum of p dp), where the sum is the dot.
    probability = _of_heads(jnp.exp(_by_query(sinks, log_sum) - log_sum))
    return -(probability * dot).sum(axis=(0, 1)).astype(sinks.dtype)


def _by_query(sinks: jax.Array, log_sum: jax.Array) -> jax.Array:
    return sinks.astype(jnp.float32).reshape(1, *log_sum.shape[1:3], 1)


def _of_heads(x: jax.Array) -> jax.Array:
    """`x` "batch kv_head group query" as "batch query head"."""
    return x.transpose(0, 3, 1, 2).reshape(x.shape[0], x.shape[3], -1)


def visible_scores(
    query: jax.Array, key: jax.Array, *, visible: Visible, block: QueryBlock, product_dtype: DTypeLike
) -> jax.Array:
    """Masked scores of a block, "batch kv_head (group query) key", float32; see `Visible.mask_scores`."""
    product = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=product_dtype)
    # Scaled after the product in float32: a product in bfloat16 has rounded once already.
    return visible.mask_scores(product.astype(jnp.float32) * query.shape[-1] ** -0.5, block)


def drop(x: jax.Array, dropout: AttentionDropout | None, *, block: QueryBlock | Tile, seq: int) -> jax.Array:
    """Probabilities of a block, or their gradients, with dropout: "batch kv_head (group query) key".

    Source: dropout of probabilities as in Megatron-LM's `CoreAttention`.
    """
    if dropout is None or dropout.rate == 0:
        return x
    batch, num_kv_heads, num_rows, num_keys = x.shape
    sequence = dropout.random.first_sequence + jnp.arange(batch)
    # Global indices of sequence, head and position: every device and block draws the same bits for an element.
    head = value_of(dropout.first_head) + jnp.arange(num_kv_heads * num_rows // block.num_queries)
    position = block.first_query + jnp.arange(block.num_queries)
    rows = (sequence[:, None, None] * dropout.num_heads + head[:, None]) * seq + position
    mask = keep_mask(
        dropout.random.words,
        site=Site.ATTENTION_PROBABILITIES,
        rows=rows.reshape(batch, num_kv_heads, num_rows),
        num_columns=num_keys,
        rate=dropout.rate,
        first_column=block.first_key,
    )
    return keep(x, mask, dropout.rate)


def block_gradients(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    probabilities: jax.Array,
    d_output: jax.Array,
    *,
    output_dot: jax.Array | None,
    dropout: AttentionDropout | None,
    block: QueryBlock | Tile,
    seq: int,
    product_dtype: DTypeLike,
    query_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients for the queries, keys and values of a block, all as matrices.

    Args:
        probabilities: "batch kv_head (group query) key", before dropout.
        output_dot: "batch kv_head (group query)", float32: the dot of the block's output with its gradient,
            or None to compute it from the probabilities.
        product_dtype: dtype of the gradients of probabilities, keys and values.
        query_dtype: dtype of the gradients of queries; None: that of the queries.

    Returns:
        Gradients for queries in `query_dtype`, for keys and values in `product_dtype`.
    """
    # As forward multiplied them, mask and dtype included.
    dropped = drop(probabilities, dropout, block=block, seq=seq).astype(value.dtype)
    d_value = jnp.einsum("bhqk,bhqd->bhkd", dropped, d_output, preferred_element_type=product_dtype)
    d_dropped = jnp.einsum("bhqd,bhkd->bhqk", d_output, value, preferred_element_type=product_dtype)
    # Dropout is linear, so its transpose is the same mask.
    d_probabilities = drop(d_dropped, dropout, block=block, seq=seq).astype(jnp.float32)
    p = probabilities.astype(jnp.float32)
    # The softmax's gradient is p (dp - sum(p dp)). The sum equals the dot of output and its gradient, which has
    # head_dim terms in place of one for each key (Dao et al., FlashAttention, NeurIPS 2022, appendix B.2).
    mean = (p * d_probabilities).sum(axis=-1) if output_dot is None else output_dot
    # The two matmuls below read it, so it takes the dtype in which tensor cores multiply.
    d_scores = (query.shape[-1] ** -0.5 * p * (d_probabilities - mean[..., None])).astype(query.dtype)
    d_query = jnp.einsum("bhqk,bhkd->bhqd", d_scores, key, preferred_element_type=query_dtype)
    d_key = jnp.einsum("bhqk,bhqd->bhkd", d_scores, query, preferred_element_type=product_dtype)
    return d_query, d_key, d_value
