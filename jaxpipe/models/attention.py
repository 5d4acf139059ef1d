"""The attention functions, one for each value of `model.attention`, and the cache of keys and values for sampling.

    (query: "batch seq head head_dim", key, value: "batch seq kv_head head_dim", *, visible, dropout)
        -> "batch seq head head_dim"

All have this signature, scale by head_dim**-0.5 and take the softmax in float32, over the keys that a query sees
(`visible`). Heads come in groups, one for each key-value head: head = kv_head * group_size + index in the group. They
differ in what they save for backward and in where they run. With a `Cache`, each further token costs one column of
attention; it is for sampling on one device: nothing is differentiated, and rows of a batch are equally long. Left to
others: projections (`block`), recomputation (`model.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.errors import ConfigError
from jaxpipe.mesh.abstract import Sizes, is_estimated, stand_in
from jaxpipe.models.attention_blocks import (
    KEPT,
    AttentionDropout,
    QueryBlock,
    Visible,
    block_gradients,
    drop,
    from_matrices,
    to_matrices,
    visible_scores,
    with_sinks,
)
from jaxpipe.models.attention_chunked import chunked

__all__ = ["ATTENTION", "KEPT", "AttentionDropout", "Visible", "check_cudnn", "chunked", "cudnn", "xla"]

_NO_DOCUMENTS = "data.packing='documents': JAX gives it no mask between the documents of a row"
_MAX_CUDNN_HEAD_DIM = 256  # on Hopper and later; jax itself refuses more than 128 on older GPUs


# Its own vjp, because the automatic one saves several arrays of the size of the probabilities and this one saves
# them once, in the dtype of the queries: masks and dropped probabilities are recomputed.
@jax.custom_vjp
def xla(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible, dropout: AttentionDropout | None
) -> jax.Array:
    """Attention as two batched matmuls, for every platform; saves the probabilities."""
    return _xla_forward(query, key, value, visible, dropout)[0]


def _xla_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible, dropout: AttentionDropout | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    num_kv_heads = key.shape[2]
    seq = query.shape[1]
    block = QueryBlock(0, seq, 0, seq)
    scores = visible_scores(
        to_matrices(query, num_kv_heads),
        to_matrices(key, num_kv_heads),
        visible=visible,
        block=block,
        product_dtype=query.dtype,
    )
    # The softmax is in float32, since its sum over the keys loses small terms in bfloat16; what is saved has the
    # dtype of the queries, in which the next matmul reads it.
    probabilities = checkpoint_name(jax.nn.softmax(scores, axis=-1).astype(query.dtype), KEPT)
    # Not saved: backward draws the mask again.
    dropped = drop(probabilities, dropout, block=block, seq=seq)
    output = jnp.einsum("bhqk,bhkd->bhqd", dropped, to_matrices(value, num_kv_heads))
    return from_matrices(output, seq), (query, key, value, probabilities, dropout)


def _xla_backward(
    residuals: tuple[Any, ...], d_output: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    query, key, value, probabilities, dropout = residuals
    num_kv_heads = key.shape[2]
    seq = query.shape[1]
    gradients = block_gradients(
        to_matrices(query, num_kv_heads),
        to_matrices(key, num_kv_heads),
        to_matrices(value, num_kv_heads),
        probabilities,
        to_matrices(d_output, num_kv_heads),
        output_dot=None,
        dropout=dropout,
        block=QueryBlock(0, seq, 0, seq),
        seq=seq,
        product_dtype=query.dtype,
    )
    d_query, d_key, d_value = (from_matrices(gradient, seq) for gradient in gradients)
    # A custom vjp owes a gradient for every argument; masks and keys of dropout are integers and have none.
    return d_query, d_key, d_value, None, None


xla.defvjp(_xla_forward, _xla_backward)


def cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, *, visible: Visible, dropout: AttentionDropout | None
) -> jax.Array:
    """Attention by the fused kernels of cuDNN, without dropout; saves the same as `chunked`.

    Padding stands at the end of a sequence: cuDNN is told how many tokens come before it, and backward keeps that
    number, one int32 for each sequence.

    Raises:
        ConfigError: dropout is above 0, or rows are documents back to back.
    """
    if dropout is not None and dropout.rate:
        raise _refusal([_no_dropout(dropout.rate)])
    if visible.positions is not None:
        raise _refusal([_NO_DOCUMENTS])
    if is_estimated():  # where there need be no cuDNN, without which JAX does not even trace it
        return _estimated(query, key, value, visible)
    padding_mask = visible.padding_mask
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=visible.causal,
        # int32, as `dot_product_attention` asks.
        key_value_seq_lengths=None if padding_mask is None else padding_mask.sum(axis=1, dtype=jnp.int32),
        # To the left and right of the query, without itself.
        local_window_size=None if visible.window is None else (visible.window - 1, 0),
        implementation="cudnn",
    )


# Functions of the same shapes that save the same and say what cuDNN's kernels compute; they are never run.


@jax.custom_vjp
def _estimated(query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible) -> jax.Array:
    return _estimated_forward(query, key, value, visible)[0]


def _estimated_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible
) -> tuple[jax.Array, tuple[Any, ...]]:
    scores, attended = _fused_matmuls(query, key, visible)
    batch, seq, num_heads, _ = query.shape
    log_sums = jax.ShapeDtypeStruct((batch, num_heads, seq), jnp.float32)
    output, log_sum = stand_in((query, log_sums), (scores, attended), fused=True)(query, key, value)
    return output, (query, key, value, output, log_sum, visible)


def _estimated_backward(residuals: tuple[Any, ...], d_output: jax.Array) -> tuple[jax.Array, ...]:
    query, key, value, output, log_sum, visible = residuals
    scores, attended = _fused_matmuls(query, key, visible)
    # The scores once more, which were not saved; of each of the two products the gradients of both factors.
    products = (scores, scores, scores, attended, attended)
    call = stand_in((query, key, value), products, fused=True)
    return *call(query, key, value, output, log_sum, d_output), None  # pyright: ignore[reportReturnType]


_estimated.defvjp(_estimated_forward, _estimated_backward)


def _fused_matmuls(query: jax.Array, key: jax.Array, visible: Visible) -> tuple[Sizes, Sizes]:
    """Sizes of the two products of a forward: as many keys as a query sees on average."""
    batch, seq, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    num_queries = num_heads // num_kv_heads * seq
    num_keys = mean_keys(seq, causal=visible.causal, window=visible.window)
    num = batch * num_kv_heads
    return (num_queries, num_keys, head_dim, num), (num_queries, head_dim, num_keys, num)


def mean_keys(seq_len: int, *, causal: bool, window: int | None) -> int:
    """Keys that a query sees on average: kernels of small tiles skip those that no query of a tile sees.

    Example:
        >>> mean_keys(300, causal=True, window=None), mean_keys(300, causal=False, window=None)
        (150, 300)
    """
    seen = min(window or seq_len, seq_len)
    mean = (seq_len * seen - seen * (seen - 1) // 2) / seq_len if causal else seq_len
    return max(1, round(mean))


def check_cudnn(
    *, platform: str, dtype: str, head_dim: int, attention_dropout: float, packs_documents: bool = False
) -> None:
    """Raises ConfigError, with all reasons, if `cudnn` cannot compute a model's attention.

    Args:
        packs_documents: whether a row has several documents that do not see each other.
    """
    reasons = []
    if platform != "gpu":
        reasons.append(f"platform={platform!r}: it runs on NVIDIA GPUs alone")
    if dtype != "bfloat16":
        reasons.append(f"dtype={dtype!r}: it computes in bfloat16 alone")
    if head_dim % 8 or head_dim > _MAX_CUDNN_HEAD_DIM:
        reasons.append(f"head_dim={head_dim}: not a multiple of 8 up to {_MAX_CUDNN_HEAD_DIM}")
    if attention_dropout:
        reasons.append(_no_dropout(attention_dropout))
    if packs_documents:
        reasons.append(_NO_DOCUMENTS)
    if reasons:
        raise _refusal(reasons)


def _no_dropout(rate: float) -> str:
    return f"attention_dropout={rate}: its masks would depend on how the heads are split over devices"


def _refusal(reasons: list[str]) -> ConfigError:
    return ConfigError(
        "model.attention='cudnn' cannot compute this model's attention",
        rule="attention-cudnn: an NVIDIA GPU, bfloat16, head_dim a multiple of 8, no attention dropout,"
        " a row that is one document or a window",
        picture="\n".join(reasons),
        repair="set model.attention='chunked', which saves the same for backward",
    )


ATTENTION: dict[str, Callable[..., jax.Array]] = {"xla": xla, "cudnn": cudnn, "chunked": chunked}


@partial(jax.tree_util.register_dataclass, data_fields=["keys", "values", "num_tokens", "layer"], meta_fields=[])
@dataclass(frozen=True)
class Cache:
    """The keys and values of all layers, and the layer that is next."""

    # "layer batch kv_head size head_dim", with norm and rotation; those after the newest token are not read.
    keys: jax.Array
    values: jax.Array  # likewise, perhaps of another size
    num_tokens: jax.Array  # int32, the tokens whose logits are known, the same in all rows
    layer: jax.Array  # int32, the layer that reads and writes

    @classmethod
    def empty(cls, keys: tuple[int, ...], values: tuple[int, ...], dtype: Any) -> Cache:
        """A cache of no tokens: keys and values of these shapes."""
        # Four arrays of their own, since a program that they are given to may write over each.
        of_tokens = (jnp.zeros(shape, dtype) for shape in (keys, values))
        return cls(*of_tokens, *(jnp.zeros((), jnp.int32) for _ in range(2)))

    def followed_by(self, key: jax.Array, value: jax.Array) -> Cache:
        """The cache with the layer's keys and values of further tokens, each "batch token kv_head head_dim"."""

        # An update in another dtype than the cache's is an error of XLA.
        def written(kept: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(
                kept, new.astype(kept.dtype).transpose(0, 2, 1, 3)[None], (self.layer, 0, 0, self.num_tokens, 0)
            )

        return replace(self, keys=written(self.keys, key), values=written(self.values, value))

    def attend(self, query: jax.Array, *, window: int | None, sinks: jax.Array | None = None) -> jax.Array:
        """Attended values "batch query head head_dim" of the further tokens, whose keys and values are in the cache."""
        keys, values = (lax.dynamic_index_in_dim(kept, self.layer, keepdims=False) for kept in (self.keys, self.values))
        num_queries = query.shape[1]
        size = keys.shape[2]
        scores = jnp.einsum("bhqd,bhkd->bhqk", to_matrices(query, keys.shape[1]), keys).astype(jnp.float32)
        # Queries of a group stand one below the other, so positions repeat every `num_queries` rows.
        place = self.num_tokens + jnp.arange(scores.shape[2]) % num_queries
        before = place[:, None] - jnp.arange(size)  # how far a key is before a query
        # The minimum with `size` changes no mask, and keeps a very large window within int32.
        is_seen = (before >= 0) & (before < min(window or size, size))
        # -inf cannot make a row of NaN here: every query sees its own key.
        scores = jnp.where(is_seen, scores * query.shape[-1] ** -0.5, -jnp.inf)
        attended = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1).astype(values.dtype), values)
        log_sum = jax.nn.logsumexp(scores, axis=-1).reshape(*scores.shape[:2], -1, num_queries)
        return with_sinks(from_matrices(attended, num_queries), log_sum, sinks)[0]
