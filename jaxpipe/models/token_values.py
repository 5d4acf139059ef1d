"""Each target's log-probability and entropy from a head, and the gradients of a loss of one's own over them.

In go the head's features and its part of the vocabulary, as in `cross_entropy`; out come two numbers a target. A loss
over them has a weight for each, known only when the numbers of all targets are: so logits are computed twice, a chunk
of tokens at a time, which is one product beside the three of a plain sum of losses. Left to others: the loss itself
(`token_loss`), and a vocabulary that `pipe` splits (`vocabulary_over_pipe`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models.cross_entropy import (
    KernelSums,
    Statistics,
    Vocabulary,
    chunked,
    in_dtypes,
    negative_log_probs,
    of_tokens,
    over_chunks,
    own_logits,
    softmax,
    with_gradients,
    zero_sums,
)


class TokenValues(NamedTuple):
    """What a head knows of each target, float32, of the targets' shape; 0 where a target is below 0."""

    log_probs: Any  # natural logarithm of the target's probability
    entropies: Any  # of the probabilities of all tokens in its place, in nats


class Weights(NamedTuple):
    """Gradients of a loss by some tokens' values, "tokens" or "chunk tokens" each, and what turns them into others."""

    of_log_probs: jax.Array
    of_entropies: jax.Array
    entropies: jax.Array

    @classmethod
    def of(cls, gradients: TokenValues, targets: jax.Array, whole: Statistics) -> Weights:
        """Weights "chunk tokens" from gradients of the targets' shape; 0 where a target is below 0.

        Args:
            whole: statistics of all logits, "chunk tokens" each.
        """
        padding = (0, whole.total.size - targets.size)

        def in_chunks(leaf: jax.Array) -> jax.Array:
            return jnp.pad(jnp.where(targets >= 0, leaf, 0.0).reshape(-1), padding).reshape(whole.total.shape)

        return cls(in_chunks(gradients.log_probs), in_chunks(gradients.entropies), _entropies(whole))

    def of_logits(self, probabilities: jax.Array, is_target: jax.Array) -> jax.Array:
        """The gradient of the loss by some tokens' logits, float32 "tokens local_vocab"."""
        # Of an entropy H it is -p (log p + H); p log p is 0 where p is.
        of_entropies = jax.scipy.special.xlogy(probabilities, probabilities) + probabilities * self.entropies[:, None]
        of_log_probs = self.of_log_probs[:, None] * (is_target - probabilities)
        return of_log_probs - self.of_entropies[:, None] * of_entropies


@jax.custom_vjp
def token_values(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> TokenValues:
    """Log-probability of each target and entropy in its place, float32 "batch seq", the same on all devices.

    Differentiable, with the logits of one chunk of tokens at a time. The gradient for `x` is this device's term. The
    arguments are those of `cross_entropy_sum`.
    """
    return values_of(statistics_of(x, targets, vocabulary), targets)


def statistics_of(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> Statistics:
    """The statistics of each token's logits, with those for entropies, "chunk tokens" each."""

    def chunk(tokens: tuple[jax.Array, jax.Array]) -> Statistics:
        return softmax(*tokens, vocabulary, entropies=True)[2]

    return lax.map(chunk, chunked(x, targets, vocabulary))


def values_of(whole: Statistics, targets: jax.Array) -> TokenValues:
    """The result of `token_values` from the statistics of all logits, "chunk tokens" each."""

    def of_targets(leaf: jax.Array) -> jax.Array:
        return jnp.where(targets >= 0, of_tokens(leaf, targets).reshape(targets.shape), 0.0)

    return TokenValues(of_targets(-negative_log_probs(whole)), of_targets(_entropies(whole)))


def token_values_backward(
    x: jax.Array,
    targets: jax.Array,
    vocabulary: Vocabulary,
    *,
    statistics: Statistics,
    gradients: TokenValues,
    sums: KernelSums,
) -> tuple[jax.Array, KernelSums]:
    """Gradients of a loss from its `gradients` by `token_values`: the one for `x`, and `sums` with the others added.

    Args:
        statistics: the result of `statistics_of`.
    """

    def chunk(sums: KernelSums, tokens: Any) -> tuple[KernelSums, jax.Array]:
        (x, targets), statistics, weights = tokens
        logits, is_target = own_logits(x, targets, vocabulary)
        probabilities = jnp.exp(logits - statistics.largest[:, None]) / statistics.total[:, None]
        # In the dtype of `x`, as the two products back read it.
        d_logits = weights.of_logits(probabilities, is_target).astype(x.dtype)
        return with_gradients(sums, d_logits, x), d_logits @ vocabulary.kernel

    chunks = chunked(x, targets, vocabulary), statistics, Weights.of(gradients, targets, statistics)
    sums, dx = over_chunks(chunk, sums, chunks)
    return of_tokens(dx, targets).reshape(x.shape), sums


def _entropies(statistics: Statistics) -> jax.Array:
    return jnp.log(statistics.total) - statistics.below / statistics.total


def _forward(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[TokenValues, Any]:
    statistics = statistics_of(x, targets, vocabulary)
    return values_of(statistics, targets), (x, targets, vocabulary, statistics)


def _backward(kept: Any, gradients: TokenValues) -> tuple[jax.Array, None, Vocabulary]:
    x, targets, vocabulary, statistics = kept
    dx, sums = token_values_backward(
        x, targets, vocabulary, statistics=statistics, gradients=gradients, sums=zero_sums(vocabulary)
    )
    # The integers of `targets` have no gradient.
    return dx, None, in_dtypes(sums, vocabulary)


token_values.defvjp(_forward, _backward)
