"""Attention by blocks of queries: its saved arrays grow with the sequence, not with its square.

Long rows, and those that `context` splits, go by tiles (`attention_tiles`). In others a block of queries has whole rows
of scores, only of the keys that it may see: the softmax needs no running maximum, and causal attention needs only about
half of the matmuls. Where rows are documents back to back, a block begins with the first key of its documents, rounded
to one of a few places. Plain XLA, for every platform.
Source: Dao et al., FlashAttention, NeurIPS 2022, section 3.1, for the saved arrays and their use in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.models import attention_tiles
from jaxpipe.models.attention_blocks import (
    KEPT,
    AttentionDropout,
    QueryBlock,
    Visible,
    block_gradients,
    drop,
    from_matrices,
    sink_gradients,
    to_matrices,
    visible_scores,
    with_sinks,
)

MAX_BLOCKS = 8  # More could save at most another sixteenth of the matmuls, for a larger program.
BLOCK_MULTIPLE = 128  # Smaller matrices leave a GPU idle.
MOST_IN_ROW = 8192  # tokens; a block of a longer row would have 64 MiB of scores a head and more
KEY_BLOCKS = (1, 2, 3, 5)  # of documents; there is a program for each number, so they are few


@jax.custom_vjp
def chunked(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visible,
    dropout: AttentionDropout | None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention that saves queries, keys, values, output and a log-sum-exp for each query; its dropout is `xla`'s.

    It takes the sinks of heads, too: see `attention_blocks.with_sinks`.
    """
    return _forward(query, key, value, visible, dropout, sinks)[0]


def blocks(seq: int, visible: Visible) -> list[QueryBlock]:
    """Blocks of queries with the keys that they may see; only the last may be shorter.

    Example:
        >>> [tuple(block) for block in blocks(300, Visible())]
        [(0, 128, 0, 128), (128, 256, 0, 256), (256, 300, 0, 300)]
    """
    size = _size(seq)
    return [
        visible.block(first, min(first + size, seq), seq=seq, multiple=BLOCK_MULTIPLE) for first in range(0, seq, size)
    ]


def attended_blocks(seq: int, visible: Visible) -> list[tuple[int, int]]:
    """Sizes (queries, keys) of what a device attends at once, whatever the documents.

    Example:
        >>> attended_blocks(300, Visible())
        [(128, 128), (128, 256), (44, 300)]
    """
    if goes_by_tiles(seq // visible.context.size, visible.context.size):
        pairs = attention_tiles.pairs(seq, visible)
        return [(pairs.size, pairs.size)] * pairs.num_pairs
    return [(block.num_queries, block.end_key - block.first_key) for block in blocks(seq, visible)]


def goes_by_tiles(num_queries: int, num_devices: int) -> bool:
    """Whether a device of so many queries, one of those that split a sequence, attends by tiles."""
    return num_devices > 1 or num_queries > MOST_IN_ROW


def _forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    visible: Visible,
    dropout: AttentionDropout | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    by_tiles = goes_by_tiles(query.shape[1], visible.context.size)
    forward = attention_tiles.forward if by_tiles else _by_blocks
    attended = with_sinks(*forward(query, key, value, visible, dropout), sinks)
    output, log_sum = (checkpoint_name(x, KEPT) for x in attended)
    return output, (query, key, value, output, log_sum, visible, dropout, sinks)


def _by_blocks(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible, dropout: AttentionDropout | None
) -> tuple[jax.Array, jax.Array]:
    """As `attention_tiles.forward`."""
    num_kv_heads = key.shape[2]
    seq = query.shape[1]
    keys = to_matrices(key, num_kv_heads)
    values = to_matrices(value, num_kv_heads)
    attended = partial(_attended, visible=visible, dropout=dropout, seq=seq)
    outputs = []
    log_sums = []
    for block in blocks(seq, visible):
        # The wait for the block before keeps the scores of one block at a time in memory; see `_queries_of`.
        query_block = to_matrices(_queries_of(query, block, after=outputs[-1:]), num_kv_heads)
        product, log_sum = _of_seen_keys(attended, block, visible, query_block, keys, values)
        outputs.append(from_matrices(product.astype(query.dtype), block.num_queries))
        log_sums.append(log_sum.reshape(*keys.shape[:2], -1, block.num_queries))
    return jnp.concatenate(outputs, axis=1), jnp.concatenate(log_sums, axis=-1)


def _attended(
    block: QueryBlock,
    query_block: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    visible: Visible,
    dropout: AttentionDropout | None,
    seq: int,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp of a block of queries, float32 matrices."""
    key_block, value_block = (x[:, :, block.first_key : block.end_key] for x in (keys, values))
    scores = visible_scores(query_block, key_block, visible=visible, block=block, product_dtype=jnp.float32)
    # Subtracted first, so that no exponential overflows.
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    # `total` is of all weights: dropout acts on probabilities, after the softmax.
    dropped = drop(weights, dropout, block=block, seq=seq).astype(value_block.dtype)
    product = jnp.einsum("bhqk,bhkd->bhqd", dropped, value_block, preferred_element_type=jnp.float32)
    # The division comes after the matmul, where a row has head_dim elements and not one for each key. With the log-
    # sum-exp, backward has a probability as one exponential, without maximum and sum.
    return product / total, largest + jnp.log(total)


def _backward(residuals: tuple[Any, ...], d_output: jax.Array) -> tuple[jax.Array | None, ...]:
    query, key, value, output, log_sum, visible, dropout, sinks = residuals
    d_sinks = sink_gradients(sinks, output, log_sum, d_output)
    if goes_by_tiles(query.shape[1], visible.context.size):
        gradients = attention_tiles.backward(query, key, value, output, log_sum, visible, dropout, d_output)
        return *gradients, None, None, d_sinks
    num_kv_heads = key.shape[2]
    seq = query.shape[1]
    keys = to_matrices(key, num_kv_heads)
    values = to_matrices(value, num_kv_heads)
    d_queries = []
    d_keys = []
    d_values = []
    # Sums for the keys that blocks still to come also see; float32, as up to `MAX_BLOCKS` terms are added.
    d_key_sum = None
    d_value_sum = None
    before: tuple[jax.Array, ...] = ()
    cut = blocks(seq, visible)
    ends_before = [0, *(block.end_key for block in cut[:-1])]  # of the keys that any earlier block sees
    # From the last block on: the keys that only later blocks see are complete first, and leave the sums.
    for block, end_before in zip(reversed(cut), reversed(ends_before), strict=True):
        of_queries = [to_matrices(_queries_of(x, block, after=before), num_kv_heads) for x in (query, output, d_output)]
        of_queries.append(_queries_of(log_sum, block, after=before, axis=-1).reshape(*keys.shape[:2], -1, 1))
        gradients = partial(_gradients, visible=visible, dropout=dropout, seq=seq, first_key=block.first_key)
        d_query, d_key, d_value = _of_seen_keys(gradients, block, visible, *of_queries, keys, values)
        d_query = from_matrices(d_query, block.num_queries)
        d_key = _add_to_last(d_key_sum, d_key)
        d_value = _add_to_last(d_value_sum, d_value)
        before = d_query, d_key, d_value
        num_seen_before = end_before - block.first_key
        d_queries.append(d_query)
        d_keys.append(d_key[:, :, num_seen_before:].astype(key.dtype))
        d_values.append(d_value[:, :, num_seen_before:].astype(value.dtype))
        d_key_sum = d_key[:, :, :num_seen_before]
        d_value_sum = d_value[:, :, :num_seen_before]
    d_key, d_value = (from_matrices(jnp.concatenate(parts[::-1], axis=2), seq) for parts in (d_keys, d_values))
    return jnp.concatenate(d_queries[::-1], axis=1), d_key, d_value, None, None, d_sinks


def _gradients(
    block: QueryBlock,
    query_block: jax.Array,
    output_block: jax.Array,
    d_output_block: jax.Array,
    log_sum_block: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    *,
    visible: Visible,
    dropout: AttentionDropout | None,
    seq: int,
    first_key: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of a block's queries, and of the keys and values from `first_key` on, zeros before the block's own."""
    key_block, value_block = (x[:, :, block.first_key : block.end_key] for x in (keys, values))
    scores = visible_scores(query_block, key_block, visible=visible, block=block, product_dtype=jnp.float32)
    d_query, d_key, d_value = block_gradients(
        query_block,
        key_block,
        value_block,
        jnp.exp(scores - log_sum_block),
        d_output_block,
        output_dot=(output_block.astype(jnp.float32) * d_output_block.astype(jnp.float32)).sum(axis=-1),
        dropout=dropout,
        block=block,
        seq=seq,
        product_dtype=jnp.float32,
    )
    # The branches of a switch return equal shapes: gradients begin at the block's first possible key.
    if block.first_key == first_key:
        return d_query, d_key, d_value
    before = ((0, 0), (0, 0), (block.first_key - first_key, 0), (0, 0))
    return d_query, jnp.pad(d_key, before), jnp.pad(d_value, before)


def first_keys(block: QueryBlock, visible: Visible) -> list[int]:
    """Places where the keys of a block may begin, the last first: after so many blocks of keys, or all.

    Example:
        >>> first_keys(QueryBlock(1792, 2048, 0, 2048), Visible(positions=jnp.zeros((1, 2048), jnp.int32)))
        [1792, 1536, 1280, 768, 0]
    """
    if visible.positions is None:
        return [block.first_key]
    size = _size(visible.positions.shape[1])
    # - 1: the keys at the queries' own positions are the first block of keys.
    places = [block.first_query - (num_blocks - 1) * size for num_blocks in KEY_BLOCKS]
    return [*(place for place in places if place > block.first_key), block.first_key]


def _of_seen_keys(function: Callable[..., Any], block: QueryBlock, visible: Visible, *arrays: jax.Array) -> Any:
    """Result of `function` for `block`, begun at the last of its `first_keys` that its documents allow."""
    places = first_keys(block, visible)
    if len(places) == 1:
        return function(block, *arrays)
    first_seen = visible.document_starts[:, block.first_query].min()  # documents stand in the order of their starts
    # Counts the places that begin too late. The last one needs no comparison, as it suits every document.
    index = (first_seen < jnp.array(places[:-1])).sum()
    return jax.lax.switch(index, [partial(function, block._replace(first_key=place)) for place in places], *arrays)


def _queries_of(x: jax.Array, block: QueryBlock, *, after: Sequence[jax.Array], axis: int = 1) -> jax.Array:
    """The rows of `x` for the queries of a block, read when all of `after`, results of the block before, are there.

    So only one block has scores, and their gradients, at a time; a GPU's scheduler would begin with the products of
    all. The place depends on numbers of `after`, but is the block's for any numbers, which the compiler cannot know.
    """
    place = jnp.int32(block.first_query)
    for result in after:
        # Through float32, since a 16-bit number has no bits of an int32; without the sign the integer is never below
        # 0, so the minimum is 0 for any number, NaN included.
        bits = jax.lax.bitcast_convert_type(result[(0,) * result.ndim].astype(jnp.float32), jnp.int32)
        place += jnp.minimum(bits & 0x7FFFFFFF, 0)
    return jax.lax.dynamic_slice_in_dim(x, place, block.num_queries, axis)


def _size(seq: int) -> int:
    """Queries of a block."""
    # Rounded up twice at once: at most `MAX_BLOCKS` blocks, of whole multiples.
    return BLOCK_MULTIPLE * -(-seq // (MAX_BLOCKS * BLOCK_MULTIPLE))


def _add_to_last(later: jax.Array | None, d_block: jax.Array) -> jax.Array:
    """Gradients of a block's keys, plus those that later blocks add to its last keys."""
    if later is None:
        return d_block
    num_others = d_block.shape[2] - later.shape[2]
    if not num_others:
        return later + d_block
    return jnp.concatenate([d_block[:, :, :num_others], later + d_block[:, :, num_others:]], axis=2)


chunked.defvjp(_forward, _backward)
