"""The cross entropy of a product of hidden states with a vocabulary, without ever holding all logits.

Loss and gradients are found together, for a few tokens at a time: logits, their softmax, the product back.
Over a `tensor` axis each device holds the logits of its own words; of each token only the largest logit,
the sum of exponentials and the target's logit are exchanged.
Source: Shoeybi et al., Megatron-LM, 2019, section 3 (parallel cross entropy).
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.mesh import TensorAxis

MOST_LOGITS = 2**24  # float32 logits held at once on a device: 64 MiB

Gradients = tuple[jax.Array, jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def cross_entropy_sum(x: jax.Array, kernel: jax.Array, targets: jax.Array, tensor: TensorAxis) -> jax.Array:
    """The sum over tokens of -log softmax(x @ kernel.T)[target], in nats, float32, the same on all devices.

    The gradient for `x` is this device's term of it, of its own words; `x` as gathered over `tensor` sums them.

    Args:
        x: "batch seq hidden", the same on all devices of `tensor`.
        kernel: "local_vocab hidden", this device's words.
        targets: "batch seq"; a target below 0 is not valid and counts nothing.
        tensor: the devices that share the vocabulary.
    """
    chunks = _chunks(x, kernel, targets)
    return lax.map(lambda chunk: _of_chunk(chunk[0], chunk[1], kernel, tensor)[0], chunks).sum()


def _forward(x: jax.Array, kernel: jax.Array, targets: jax.Array, tensor: TensorAxis) -> tuple[jax.Array, Gradients]:
    def chunk(sums: tuple[jax.Array, jax.Array], tokens: tuple[jax.Array, jax.Array]) -> tuple[tuple, jax.Array]:
        loss, d_logits = _of_chunk(*tokens, kernel, tensor)
        d_kernel = jnp.einsum("tv,th->vh", d_logits, tokens[0], preferred_element_type=jnp.float32)
        return (sums[0] + loss, sums[1] + d_kernel), d_logits @ kernel

    zeros = (jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32))
    (loss, d_kernel), dx = lax.scan(chunk, zeros, _chunks(x, kernel, targets))
    return loss, (dx.reshape(x.shape), d_kernel.astype(kernel.dtype))


def _backward(tensor: TensorAxis, gradients: Gradients, d_loss: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    dx, d_kernel = ((d_loss * gradient).astype(gradient.dtype) for gradient in gradients)
    return dx, d_kernel, None


cross_entropy_sum.defvjp(_forward, _backward)


def _of_chunk(x: jax.Array, targets: jax.Array, kernel: jax.Array, tensor: TensorAxis) -> tuple[jax.Array, jax.Array]:
    """The loss of some tokens "tokens hidden", and its gradient for their logits "tokens local_vocab"."""
    logits = jnp.einsum("th,vh->tv", x, kernel, preferred_element_type=jnp.float32)
    words = jnp.arange(kernel.shape[0]) + tensor.index() * kernel.shape[0]
    is_target = targets[:, None] == words  # nowhere for a target below 0
    largest = tensor.max(logits.max(axis=-1))
    exponentials = jnp.exp(logits - largest[:, None])
    total, chosen = tensor.sum(jnp.stack([exponentials.sum(-1), jnp.where(is_target, logits, 0.0).sum(-1)]))
    loss = jnp.where(targets >= 0, jnp.log(total) + largest - chosen, 0.0).sum()
    d_logits = jnp.where(targets[:, None] >= 0, exponentials / total[:, None] - is_target, 0.0)
    return loss, d_logits.astype(x.dtype)


def _chunks(x: jax.Array, kernel: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`x` and `targets` as "chunk tokens hidden" and "chunk tokens", as few chunks as MOST_LOGITS allows."""
    num_tokens = math.prod(targets.shape)
    num_chunks = num_chunks_of(num_tokens, kernel.shape[0])
    return x.reshape(num_chunks, -1, x.shape[-1]), targets.reshape(num_chunks, -1)


def num_chunks_of(num_tokens: int, vocab_size: int) -> int:
    """The least divisor of `num_tokens` with at most MOST_LOGITS logits in a chunk, or a token a chunk.

    Example:
        >>> num_chunks_of(2048, 51200), num_chunks_of(1024, 256)
        (8, 1)
    """
    divisors = np.flatnonzero(num_tokens % np.arange(1, num_tokens + 1) == 0) + 1
    return int(next((n for n in divisors if num_tokens // n * vocab_size <= MOST_LOGITS), num_tokens))
