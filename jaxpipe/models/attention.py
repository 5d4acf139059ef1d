"""The attention functions: one for each value of `model.attention`, all with the same signature.

    (query: "batch seq head head_dim", key, value: "batch seq kv_head head_dim", *, visible, dropout)
        -> "batch seq head head_dim"

All scale by head_dim**-0.5 and take the softmax in float32, over the keys that a query sees (`visible`). Heads
come in groups, one for each key-value head: head = kv_head * group_size + index in the group. They differ in
what they save for backward and in where they run. Left to others: projections (`block`), recomputation
(`model.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.errors import ConfigError, explain
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
)
from jaxpipe.models.attention_chunked import chunked

__all__ = ["ATTENTION", "KEPT", "AttentionDropout", "Visible", "check_cudnn", "chunked", "cudnn", "xla"]

_NO_DOCUMENTS = "data.packing='documents': JAX gives it no mask between the documents of a row"
_MAX_CUDNN_HEAD_DIM = 256  # on Hopper and later; jax itself refuses more than 128 on older GPUs


def xla(
    query: jax.Array, key: jax.Array, value: jax.Array, *, visible: Visible, dropout: AttentionDropout | None
) -> jax.Array:
    """Attention as two batched matmuls, for every platform; saves the probabilities.

    Args:
        query: "batch seq head head_dim".
        key: "batch seq kv_head head_dim"; `value` likewise.
        visible: the keys that a query sees.
        dropout: dropout of the probabilities.

    Returns:
        "batch seq head head_dim".
    """
    return _xla(query, key, value, visible, dropout)


# Its own vjp, because the automatic one saves several arrays of the size of the probabilities and this one saves
# them once, in the dtype of the queries: masks and dropped probabilities are recomputed.
@jax.custom_vjp
def _xla(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible, dropout: AttentionDropout | None
) -> jax.Array:
    return _xla_forward(query, key, value, visible, dropout)[0]


def _xla_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible, dropout: AttentionDropout | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    num_kv_heads, seq = key.shape[2], query.shape[1]
    block = QueryBlock(0, seq, 0, seq)
    scores = visible_scores(
        to_matrices(query, num_kv_heads),
        to_matrices(key, num_kv_heads),
        visible=visible,
        block=block,
        product_dtype=query.dtype,
    )
    probabilities = checkpoint_name(jax.nn.softmax(scores, axis=-1).astype(query.dtype), KEPT)
    dropped = drop(probabilities, dropout, block=block, seq=seq)
    output = jnp.einsum("bhqk,bhkd->bhqd", dropped, to_matrices(value, num_kv_heads))
    return from_matrices(output, seq), (query, key, value, probabilities, dropout)


def _xla_backward(
    residuals: tuple[Any, ...], d_output: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    query, key, value, probabilities, dropout = residuals
    num_kv_heads, seq = key.shape[2], query.shape[1]
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
    return d_query, d_key, d_value, None, None


_xla.defvjp(_xla_forward, _xla_backward)


def cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, *, visible: Visible, dropout: AttentionDropout | None
) -> jax.Array:
    """Attention by the fused kernels of cuDNN, without dropout; saves the same as `chunked`.

    Padding stands at the end of a sequence: cuDNN is told how many tokens come before it, and backward keeps that
    number, one int32 for each sequence.

    Args:
        query: "batch seq head head_dim", as `check_cudnn` accepts.
        key: "batch seq kv_head head_dim"; `value` likewise.
        visible: the keys that a query sees.
        dropout: None, or dropout of rate 0.

    Returns:
        "batch seq head head_dim".

    Raises:
        ConfigError: dropout is above 0, or rows are documents back to back.
    """
    if dropout is not None and dropout.rate:
        raise _refusal([_no_dropout(dropout.rate)])
    if visible.positions is not None:
        raise _refusal([_NO_DOCUMENTS])
    padding_mask = visible.padding_mask
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        is_causal=visible.causal,
        key_value_seq_lengths=None if padding_mask is None else padding_mask.sum(axis=1, dtype=jnp.int32),
        # To the left and right of the query, without itself.
        local_window_size=None if visible.window is None else (visible.window - 1, 0),
        implementation="cudnn",
    )


def check_cudnn(
    *, platform: str, dtype: str, head_dim: int, attention_dropout: float, packs_documents: bool = False
) -> None:
    """Raises ConfigError, with all reasons, if `cudnn` cannot compute a model's attention.

    Args:
        platform: "gpu" or "cpu".
        dtype: dtype that the layers compute in.
        head_dim: size of a head.
        attention_dropout: the probability to drop.
        packs_documents: whether a row has several documents that do not see each other.

    Raises:
        ConfigError: cuDNN does not support the model or platform.
    """
    reasons = []
    if platform != "gpu":
        reasons.append(f"platform={platform!r}: it runs on NVIDIA GPUs alone")
    if dtype not in ("bfloat16", "float16"):
        reasons.append(f"dtype={dtype!r}: it computes in bfloat16 or float16 alone")
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
        explain(
            "model.attention='cudnn' cannot compute this model's attention",
            rule="attention-cudnn: an NVIDIA GPU, bfloat16 or float16, head_dim a multiple of 8, no attention dropout,"
            " a row that is one document or a window",
            picture="\n".join(reasons),
            repair="set model.attention='chunked', which saves the same for backward",
        )
    )


ATTENTION: dict[str, Callable[..., jax.Array]] = {"xla": xla, "cudnn": cudnn, "chunked": chunked}
