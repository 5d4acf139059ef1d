"""Causal attention by blocks of queries: what it saves grows with the sequence, not with its square.

A block of queries sees the keys up to its own end and no others, so that almost half of the products fall
away, and its scores are whole rows: the softmax needs no running maximum. Plain XLA, for every platform.
Source: Dao et al., FlashAttention, NeurIPS 2022, section 3.1, for what is saved and how backward uses it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.models.attention_parts import (
    AttentionDropout,
    block_gradients,
    causal_scores,
    drop,
    from_matrices,
    to_matrices,
)

MAX_BLOCKS = 8  # More could save at most another sixteenth of the products, for a larger program.
BLOCK_MULTIPLE = 128  # Smaller matrices leave a GPU idle.


def chunked(query: jax.Array, key: jax.Array, value: jax.Array, *, dropout: AttentionDropout | None) -> jax.Array:
    """Causal attention that saves queries, keys, values, output and a log-sum-exp for each query.

    Args:
        query: "batch seq head head_dim".
        key: "batch seq kv_head head_dim"; `value` likewise.
        dropout: of the probabilities; the same as that of `xla`.

    Returns:
        "batch seq head head_dim".
    """
    return _chunked(query, key, value, dropout)


def blocks(seq: int) -> list[tuple[int, int]]:
    """First and end position of each block of queries; only the last is shorter than the others.

    Example:
        >>> blocks(300)
        [(0, 128), (128, 256), (256, 300)]
    """
    size = BLOCK_MULTIPLE * -(-seq // (MAX_BLOCKS * BLOCK_MULTIPLE))
    return [(first, min(first + size, seq)) for first in range(0, seq, size)]


@jax.custom_vjp
def _chunked(query: jax.Array, key: jax.Array, value: jax.Array, dropout: AttentionDropout | None) -> jax.Array:
    return _forward(query, key, value, dropout)[0]


def _forward(
    query: jax.Array, key: jax.Array, value: jax.Array, dropout: AttentionDropout | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    num_kv_heads, seq = key.shape[2], query.shape[1]
    keys, values = to_matrices(key, num_kv_heads), to_matrices(value, num_kv_heads)
    queries, outputs, log_sums = query, [], []
    for first, end in blocks(seq):
        scores = causal_scores(
            to_matrices(queries[:, first:end], num_kv_heads),
            keys[:, :, :end],
            first_query=first,
            product_dtype=jnp.float32,
        )
        largest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        dropped = drop(weights, dropout, first_query=first, seq=seq).astype(value.dtype)
        product = jnp.einsum("bhqk,bhkd->bhqd", dropped, values[:, :, :end], preferred_element_type=jnp.float32)
        output = from_matrices((product / total).astype(query.dtype), end - first)
        # One block after the other: without it a GPU's scheduler keeps the scores of several at once.
        output, queries = jax.lax.optimization_barrier((output, queries))
        outputs.append(output)
        log_sums.append((largest + jnp.log(total)).reshape(*keys.shape[:2], -1, end - first))
    output = jnp.concatenate(outputs, axis=1)
    return output, (query, key, value, output, jnp.concatenate(log_sums, axis=-1), dropout)


def _backward(residuals: tuple[Any, ...], d_output: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    query, key, value, output, log_sum, dropout = residuals
    num_kv_heads, seq = key.shape[2], query.shape[1]
    keys, values = to_matrices(key, num_kv_heads), to_matrices(value, num_kv_heads)
    d_queries, d_keys, d_values = [], [], []
    d_key_sum, d_value_sum = 0.0, 0.0  # float32, for the keys that the blocks to come also see
    for first, end in reversed(blocks(seq)):
        query_block, output_block, d_output_block = (
            to_matrices(x[:, first:end], num_kv_heads) for x in (query, output, d_output)
        )
        scores = causal_scores(query_block, keys[:, :, :end], first_query=first, product_dtype=jnp.float32)
        d_query, d_key, d_value = block_gradients(
            query_block,
            keys[:, :, :end],
            values[:, :, :end],
            jnp.exp(scores - log_sum[..., first:end].reshape(*keys.shape[:2], -1, 1)),
            d_output_block,
            output_dot=(output_block.astype(jnp.float32) * d_output_block.astype(jnp.float32)).sum(axis=-1),
            dropout=dropout,
            first_query=first,
            seq=seq,
            product_dtype=jnp.float32,
        )
        d_query, d_key, d_value = from_matrices(d_query, end - first), d_key_sum + d_key, d_value_sum + d_value
        (d_query, d_key, d_value), query = jax.lax.optimization_barrier(((d_query, d_key, d_value), query))
        d_queries.append(d_query)
        d_keys.append(d_key[:, :, first:].astype(key.dtype))
        d_values.append(d_value[:, :, first:].astype(value.dtype))
        d_key_sum, d_value_sum = d_key[:, :, :first], d_value[:, :, :first]
    d_key, d_value = (from_matrices(jnp.concatenate(parts[::-1], axis=2), seq) for parts in (d_keys, d_values))
    return jnp.concatenate(d_queries[::-1], axis=1), d_key, d_value, None


_chunked.defvjp(_forward, _backward)
