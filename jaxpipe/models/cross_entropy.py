"""Cross entropy over a vocabulary, without storing the logits of all tokens.

Loss and gradients are computed together, for a few tokens at a time: logits, their softmax, the matmul back.
Over a `tensor` axis each device holds the logits of its own rows; of each token only the largest logit,
the sum of exponentials and the target's logit are exchanged.
Source: Shoeybi et al., Megatron-LM, 2019, section 3 (parallel cross entropy).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.mesh import TensorAxis

MOST_LOGITS = 2**24  # float32 logits held at once on a device: 64 MiB

# For x, kernel and bias.
Gradients = tuple[jax.Array, jax.Array, jax.Array | None]


def cross_entropy_sum(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    tensor: TensorAxis,
    *,
    bias: jax.Array | None = None,
    vocab_size: int | None = None,
) -> jax.Array:
    """Sum over tokens of -log softmax(x @ kernel.T + bias)[target], in nats, float32, the same on all devices.

    The gradient for `x` is this device's term, from its own rows; the gather of `x` over `tensor` sums the terms.

    Args:
        x: "batch seq hidden", the same on all devices of `tensor`.
        kernel: "local_vocab hidden", this device's rows.
        targets: "batch seq"; a target below 0 is not valid and counts nothing.
        tensor: the devices that share the vocabulary.
        bias: "local_vocab", this device's rows, or None.
        vocab_size: tokens of the vocabulary: rows of all kernels from it on are no tokens and are left out of the
            softmax; None: all rows are tokens.
    """
    num_rows = kernel.shape[0] * tensor.size
    return _sum(x, kernel, bias, targets, tensor, num_rows if vocab_size is None else vocab_size)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sum(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, targets: jax.Array, tensor: TensorAxis, vocab_size: int
) -> jax.Array:
    chunks = _chunks(x, kernel, targets)
    return lax.map(lambda chunk: _of_chunk(chunk[0], chunk[1], kernel, bias, tensor, vocab_size)[0], chunks).sum()


def _forward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, targets: jax.Array, tensor: TensorAxis, vocab_size: int
) -> tuple[jax.Array, Gradients]:
    def chunk(sums: tuple[Any, ...], tokens: tuple[jax.Array, jax.Array]) -> tuple[tuple[Any, ...], jax.Array]:
        loss, d_logits = _of_chunk(*tokens, kernel, bias, tensor, vocab_size)
        d_kernel = jnp.einsum("tv,th->vh", d_logits, tokens[0], preferred_element_type=jnp.float32)
        d_bias = None if bias is None else sums[2] + d_logits.astype(jnp.float32).sum(axis=0)
        return (sums[0] + loss, sums[1] + d_kernel, d_bias), d_logits @ kernel

    zeros = (
        jnp.zeros((), jnp.float32),
        jnp.zeros(kernel.shape, jnp.float32),
        None if bias is None else jnp.zeros(bias.shape, jnp.float32),
    )
    (loss, d_kernel, d_bias), dx = lax.scan(chunk, zeros, _chunks(x, kernel, targets))
    return loss, (
        dx.reshape(x.shape),
        d_kernel.astype(kernel.dtype),
        None if bias is None else d_bias.astype(bias.dtype),
    )


def _backward(tensor: TensorAxis, vocab_size: int, gradients: Gradients, d_loss: jax.Array) -> tuple[Any, ...]:
    return *jax.tree.map(lambda gradient: (d_loss * gradient).astype(gradient.dtype), gradients), None


_sum.defvjp(_forward, _backward)


def logits(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Logits `x @ kernel.T + bias`, float32 "... vocab", of `x` "... hidden" and `kernel` "vocab hidden"."""
    products = jnp.einsum("...h,vh->...v", x, kernel, preferred_element_type=jnp.float32)
    return products if bias is None else products + bias.astype(jnp.float32)


def _of_chunk(
    x: jax.Array,
    targets: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    tensor: TensorAxis,
    vocab_size: int,
) -> tuple[jax.Array, jax.Array]:
    """Loss of some tokens "tokens hidden", and its gradient for their logits "tokens local_vocab"."""
    of_rows = logits(x, kernel, bias)
    rows = jnp.arange(kernel.shape[0]) + tensor.index() * kernel.shape[0]
    if vocab_size < kernel.shape[0] * tensor.size:
        of_rows = jnp.where(rows < vocab_size, of_rows, -jnp.inf)
    is_target = targets[:, None] == rows  # nowhere for a target below 0
    largest = tensor.max(of_rows.max(axis=-1))
    exponentials = jnp.exp(of_rows - largest[:, None])
    total, chosen = tensor.sum(jnp.stack([exponentials.sum(-1), jnp.where(is_target, of_rows, 0.0).sum(-1)]))
    loss = jnp.where(targets >= 0, jnp.log(total) + largest - chosen, 0.0).sum()
    d_logits = jnp.where(targets[:, None] >= 0, exponentials / total[:, None] - is_target, 0.0)
    return loss, d_logits.astype(x.dtype)


def _chunks(x: jax.Array, kernel: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns `x` and `targets` as "chunk tokens hidden" and "chunk tokens", in as few chunks as MOST_LOGITS allows."""
    num_tokens = math.prod(targets.shape)
    num_chunks = num_chunks_of(num_tokens, kernel.shape[0])
    return x.reshape(num_chunks, -1, x.shape[-1]), targets.reshape(num_chunks, -1)


def num_chunks_of(num_tokens: int, vocab_size: int) -> int:
    """Number of chunks: the least divisor of `num_tokens` with at most MOST_LOGITS logits a chunk, or a token a chunk.

    Example:
        >>> num_chunks_of(2048, 51200), num_chunks_of(1024, 256)
        (8, 1)
    """
    divisors = np.flatnonzero(num_tokens % np.arange(1, num_tokens + 1) == 0) + 1
    return int(next((n for n in divisors if num_tokens // n * vocab_size <= MOST_LOGITS), num_tokens))
