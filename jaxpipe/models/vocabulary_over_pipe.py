"""Cross entropy in two parts, for a vocabulary that `pipe` splits too.

First each device's own softmax; then, when the statistics of all devices are there, losses, values of tokens and
gradients. Between the parts a device keeps the exponentials of its logits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models.cross_entropy import (
    NO_LOGITS,
    KernelSums,
    Statistics,
    Vocabulary,
    chunked,
    joined,
    loss_of,
    of_tokens,
    over_chunks,
    softmax,
    with_gradients,
)
from jaxpipe.models.token_values import TokenValues, Weights, values_of


def softmax_of_part(
    x: jax.Array, targets: jax.Array, vocabulary: Vocabulary, *, entropies: bool = False
) -> tuple[jax.Array, Statistics]:
    """Exponentials of this device's logits, and the statistics of the logits of all devices of `tensor`.

    Args:
        entropies: whether the statistics have what entropies are made of.

    Returns:
        "chunk tokens local_vocab" in the dtype of `x`; "chunk tokens" each.
    """

    def chunk(carry: None, tokens: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, Statistics]]:
        exponentials, _, statistics = softmax(*tokens, vocabulary, entropies=entropies)
        return carry, (exponentials.astype(x.dtype), statistics)

    return over_chunks(chunk, None, chunked(x, targets, vocabulary))[1]


def loss_of_parts(parts: Statistics, targets: jax.Array) -> jax.Array:
    """The result of `cross_entropy_sum` from the statistics of all parts, "part chunk tokens" each."""
    whole = _whole(parts)
    # Padding got a target below 0 in `chunked`; the same again here, to stand in the shape of the statistics.
    padding = whole.total.size - targets.size
    return loss_of(whole, jnp.pad(targets.reshape(-1), (0, padding), constant_values=-1).reshape(whole.total.shape))


def values_of_parts(parts: Statistics, targets: jax.Array) -> TokenValues:
    """The result of `token_values` from the statistics of all parts, "part chunk tokens" each."""
    return values_of(_whole(parts), targets)


def backward_of_part(
    x: jax.Array,
    targets: jax.Array,
    vocabulary: Vocabulary,
    *,
    exponentials: jax.Array,
    parts: Statistics,
    scale: jax.Array | float | TokenValues,
    sums: KernelSums,
) -> tuple[jax.Array, KernelSums]:
    """The gradients that `cross_entropy_backward` returns; the one for `x` is this device's term.

    Args:
        parts: the statistics of all devices of `pipe`, "part chunk tokens" each.
        scale: a factor of the sum of losses; or the gradients of another loss by `token_values`.
    """
    # The exponentials here are relative to the largest logit of this device of `pipe`; the factor makes them relative
    # to that of all, and probabilities. It is 0 where no row here is a token.
    largest_here = parts.largest[lax.axis_index("pipe")]
    whole = _whole(parts)
    factor = jnp.exp(largest_here - whole.largest) / whole.total
    rows = vocabulary.rows
    # None is no leaf: a factor of all has no chunks.
    weights = Weights.of(scale, targets, whole) if isinstance(scale, TokenValues) else None

    def chunk(sums: KernelSums, tokens: Any) -> tuple[KernelSums, jax.Array]:
        (x, targets), exponentials, factor, weights = tokens
        # Float32 before the product: the exponentials were stored in the dtype of `x`.
        probabilities = exponentials.astype(jnp.float32) * factor[:, None]
        is_target = targets[:, None] == rows
        if weights is None:
            d_logits = jnp.where(targets[:, None] >= 0, scale * (probabilities - is_target), 0.0).astype(x.dtype)
        else:
            d_logits = weights.of_logits(probabilities, is_target).astype(x.dtype)
        return with_gradients(sums, d_logits, x), d_logits @ vocabulary.kernel

    sums, dx = over_chunks(chunk, sums, (chunked(x, targets, vocabulary), exponentials, factor, weights))
    return of_tokens(dx, targets).reshape(x.shape), sums


def _whole(parts: Statistics) -> Statistics:
    """The statistics of all logits from those of parts, along the first axis."""
    # Without statistics for entropies there are none of no logits, either.
    of_none = NO_LOGITS._replace(below=None) if parts.below is None else NO_LOGITS
    return lax.reduce(parts, of_none, joined, (0,))
