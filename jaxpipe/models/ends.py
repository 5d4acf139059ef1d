"""The two ends of a language model: tokens to residual stream, residual stream to the sum of the losses.

Over a `tensor` axis each device holds some rows of the token table and of the head's kernel: some words of
the vocabulary. Left to others: the loss of the products (`cross_entropy`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpipe.mesh import Randomness, TensorAxis
from jaxpipe.models.cross_entropy import cross_entropy_sum
from jaxpipe.models.dropout import Site, drop
from jaxpipe.models.linear import initial_deviation
from jaxpipe.models.norms import LayerNorm, RMSNorm


class Embedding(nnx.Module):
    """A learned table of tokens and, where `num_positions` is not 0, of positions."""

    def __init__(
        self,
        *,
        vocab_size: int,
        num_positions: int,
        hidden: int,
        dropout_rate: float,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        deviation = initial_deviation(hidden)
        self.token = nnx.Param(deviation * jax.random.normal(rngs.params(), (vocab_size, hidden)), split=0)
        if num_positions:
            self.position = nnx.Param(deviation * jax.random.normal(rngs.params(), (num_positions, hidden)))
        self.dropout_rate, self.tensor = dropout_rate, tensor

    def __call__(self, tokens: jax.Array, random: Randomness | None) -> jax.Array:
        """The residual stream "batch local_seq hidden" of tokens "batch seq"."""
        x = self.tensor.scatter_sum(_rows(self.token[...], tokens, self.tensor), 1)
        first_position = self.tensor.index() * x.shape[1]
        if hasattr(self, "position"):
            x = x + lax.dynamic_slice_in_dim(self.position[...], first_position, x.shape[1])
        return drop(x, random, rate=self.dropout_rate, site=Site.EMBEDDING, first_position=first_position)


class Head(nnx.Module):
    """Final norm and loss; with tied embeddings it holds no kernel and is given the token table."""

    def __init__(
        self,
        norm: LayerNorm | RMSNorm,
        *,
        vocab_size: int,
        hidden: int,
        tie_embeddings: bool,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        self.norm, self.tensor = norm, tensor
        if not tie_embeddings:
            kernel = initial_deviation(hidden) * jax.random.normal(rngs.params(), (vocab_size, hidden))
            self.kernel = nnx.Param(kernel, split=0)

    def __call__(self, x: jax.Array, targets: jax.Array, token_table: jax.Array | None) -> jax.Array:
        """The sum of the losses of the valid targets, float32.

        Args:
            x: "batch local_seq hidden".
            targets: "batch seq"; a target below 0 is not valid and counts nothing.
            token_table: "local_vocab hidden" where embeddings are tied.
        """
        kernel = self.kernel[...] if token_table is None else token_table
        whole = self.tensor.gather(self.norm.apply(x, self.norm.arrays()), 1)
        return cross_entropy_sum(whole, kernel, targets, self.tensor)


def _rows(table: jax.Array, tokens: jax.Array, tensor: TensorAxis) -> jax.Array:
    """The rows of `tokens` in this device's part of the table, zeros for tokens of others: "batch seq hidden"."""
    if tensor.size == 1:
        return _take(table, tokens)
    own = tokens - tensor.index() * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    return jnp.where(is_own[..., None], _take(table, jnp.where(is_own, own, 0)), 0)


@jax.custom_vjp
def _take(table: jax.Array, rows: jax.Array) -> jax.Array:
    return table[rows]


def _add_at_rows(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    """The table's gradient, its terms added in float32: a frequent token has hundreds of them."""
    table, rows = kept
    return jnp.zeros(table.shape, jnp.float32).at[rows].add(gradient.astype(jnp.float32)).astype(table.dtype), None


_take.defvjp(lambda table, rows: (table[rows], (table, rows)), _add_at_rows)
