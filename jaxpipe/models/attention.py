"""How a layer attends: one function for each value of `model.attention`, all with the same signature.

Goes in: queries, keys, values of one layer. Comes out: the attended values. Left to others: projections
(`block`), and recomputing the probabilities in backward (`model.recompute`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def causal_softmax(scores: jax.Array, scale: float) -> jax.Array:
    """The causal softmax of `scale * scores` in float32, in the dtype of `scores`.

    Its own vjp, because the automatic one saves four arrays of the size of the scores and this one
    saves only the probabilities: where the mask cuts, they are zero, and so is the gradient.

    Args:
        scores: "... query key", as many queries as keys.
        scale: multiplies the scores before the exponential.
    """
    seq = jnp.arange(scores.shape[-1])
    visible = seq[:, None] >= seq[None, :]
    return jax.nn.softmax(scores.astype(jnp.float32) * scale, axis=-1, where=visible).astype(scores.dtype)


def _causal_softmax_forward(scores: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    probabilities: jax.Array = causal_softmax(scores, scale)
    return probabilities, probabilities


def _causal_softmax_backward(scale: float, probabilities: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    p, g = probabilities.astype(jnp.float32), gradient.astype(jnp.float32)
    return ((scale * p * (g - (g * p).sum(axis=-1, keepdims=True))).astype(probabilities.dtype),)


causal_softmax.defvjp(_causal_softmax_forward, _causal_softmax_backward)


def xla(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention as two batched matrix products; the probabilities are materialized.

    Args:
        query, key, value: "batch head seq head_dim".

    Returns:
        "batch head seq head_dim".
    """
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key)
    probabilities = causal_softmax(scores, query.shape[-1] ** -0.5)
    return jnp.einsum("bhqk,bhkd->bhqd", probabilities, value)


ATTENTION: dict[str, Callable[[jax.Array, jax.Array, jax.Array], jax.Array]] = {"xla": xla}
