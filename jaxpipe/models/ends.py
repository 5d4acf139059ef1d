"""The two ends of a language model as Flax NNX modules: tokens to residual stream, residual stream to loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.models.block import Norm, initial_deviation


class Embedding(nnx.Module):
    """Learned tables of tokens and positions."""

    def __init__(self, *, vocab_size: int, seq_len: int, hidden: int, rngs: nnx.Rngs):
        deviation = initial_deviation(hidden)
        self.token = nnx.Param(deviation * jax.random.normal(rngs.params(), (vocab_size, hidden)))
        self.position = nnx.Param(deviation * jax.random.normal(rngs.params(), (seq_len, hidden)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The residual stream "batch seq hidden" of tokens "batch seq"."""
        return self.token[...][tokens] + self.position[...][: tokens.shape[-1]]


class Head(nnx.Module):
    """Final norm and logits; with tied embeddings it holds no kernel and is given the token table."""

    def __init__(self, *, vocab_size: int, hidden: int, tie_embeddings: bool, rngs: nnx.Rngs):
        self.norm = Norm(hidden)
        if not tie_embeddings:
            self.kernel = nnx.Param(initial_deviation(hidden) * jax.random.normal(rngs.params(), (vocab_size, hidden)))

    def __call__(self, x: jax.Array, token_table: jax.Array | None = None) -> jax.Array:
        """Logits "batch seq vocab", in float32."""
        kernel = self.kernel[...] if token_table is None else token_table
        return jnp.einsum("bse,ve->bsv", self.norm(x), kernel, preferred_element_type=jnp.float32)


def token_loss_sum(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The sum of the cross entropies of the valid tokens, in nats.

    Args:
        logits: "batch seq vocab", float32.
        targets: "batch seq"; a target below 0 is not valid and counts nothing.
    """
    valid = targets >= 0
    chosen = jnp.take_along_axis(logits, jnp.where(valid, targets, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(valid, jax.nn.logsumexp(logits, axis=-1) - chosen, 0.0).sum()
