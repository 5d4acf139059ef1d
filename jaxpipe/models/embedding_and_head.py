"""Embedding and head of a language model: tokens to residual stream, residual stream to the sum of the losses.

Over a `tensor` axis each device holds some rows of the token table and of the head's kernel: some tokens of the
vocabulary. Left to others: the loss of the logits (`cross_entropy`), BERT's head (`bert`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpipe.mesh import Randomness, TensorAxis
from jaxpipe.models.cross_entropy import cross_entropy_sum, logits
from jaxpipe.models.dropout import Site, drop
from jaxpipe.models.linear import LayerNorm, RMSNorm, initial_deviation

Microbatch = dict[str, jax.Array]


class Embedding(nnx.Module):
    """A learned table of tokens and, if their number is not 0, of positions and of token types.

    Args:
        vocab_size: tokens are 0 .. vocab_size - 1.
        num_rows: rows of the token table; rows from `vocab_size` on are zeros and never looked up.
        num_positions: the longest sequence; 0: positions are not learned.
        num_token_types: "token_types" are 0 .. num_token_types - 1; 0: there are none.
        dropout_rate: dropout rate of the sum.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        num_rows: int,
        num_positions: int = 0,
        num_token_types: int = 0,
        hidden: int,
        dropout_rate: float,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        deviation = initial_deviation(hidden)
        self.token = new_token_table(vocab_size, num_rows, hidden, rngs)
        if num_positions:
            self.position = nnx.Param(deviation * jax.random.normal(rngs.params(), (num_positions, hidden)))
        if num_token_types:
            self.token_type = nnx.Param(deviation * jax.random.normal(rngs.params(), (num_token_types, hidden)))
        self.dropout_rate, self.tensor = dropout_rate, tensor

    def __call__(self, microbatch: Microbatch, random: Randomness | None) -> jax.Array:
        """The residual stream "batch local_seq hidden".

        Args:
            microbatch: "tokens" and, if there are token types, "token_types", each int32 "batch seq".
            random: None means no dropout.
        """
        x = self.tensor.scatter_sum(_rows(self.token[...], microbatch["tokens"], self.tensor), 1)
        first_position = self.tensor.index() * x.shape[1]
        if hasattr(self, "position"):
            x = x + lax.dynamic_slice_in_dim(self.position[...], first_position, x.shape[1])
        if hasattr(self, "token_type"):
            token_types = lax.dynamic_slice_in_dim(microbatch["token_types"], first_position, x.shape[1], 1)
            x = x + take(self.token_type[...], token_types)
        return drop(x, random, rate=self.dropout_rate, site=Site.EMBEDDING, first_position=first_position)


class Head(nnx.Module):
    """Final norm and loss; with tied embeddings it has no kernel and uses the token table."""

    def __init__(
        self,
        norm: LayerNorm | RMSNorm,
        *,
        vocab_size: int,
        num_rows: int,
        hidden: int,
        tie_embeddings: bool,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        self.norm, self.vocab_size, self.tensor = norm, vocab_size, tensor
        if not tie_embeddings:
            self.kernel = new_token_table(vocab_size, num_rows, hidden, rngs)

    def __call__(self, x: jax.Array, microbatch: Microbatch, token_table: jax.Array | None) -> jax.Array:
        """The sum of the losses of the valid targets, float32.

        Args:
            x: "batch local_seq hidden".
            microbatch: "targets" int32 "batch seq"; a target below 0 is not valid and counts nothing.
            token_table: "local_vocab hidden" if embeddings are tied.
        """
        kernel = self.kernel[...] if token_table is None else token_table
        whole = self.tensor.gather(self.norm.apply(x, self.norm.arrays()), 1)
        return cross_entropy_sum(whole, kernel, microbatch["targets"], self.tensor, vocab_size=self.vocab_size)

    def logits(self, x: jax.Array, token_table: jax.Array | None) -> jax.Array:
        """The logits "batch seq vocab" of `x` "batch seq hidden", float32, on one device."""
        kernel = self.kernel[...] if token_table is None else token_table
        return logits(self.norm.apply(x, self.norm.arrays()), kernel)[..., : self.vocab_size]


def new_token_table(vocab_size: int, num_rows: int, hidden: int, rngs: nnx.Rngs) -> nnx.Param:
    """Table "num_rows hidden" with a random row for each token, the same for any `num_rows`, and zeros below."""
    rows = initial_deviation(hidden) * jax.random.normal(rngs.params(), (vocab_size, hidden))
    return nnx.Param(jnp.pad(rows, ((0, num_rows - vocab_size), (0, 0))), split=0)


def _rows(table: jax.Array, tokens: jax.Array, tensor: TensorAxis) -> jax.Array:
    """Rows of `tokens` in this device's part of the table, zeros for tokens of other devices: "batch seq hidden"."""
    if tensor.size == 1:
        return take(table, tokens)
    own = tokens - tensor.index() * table.shape[0]
    is_own = (own >= 0) & (own < table.shape[0])
    return jnp.where(is_own[..., None], take(table, jnp.where(is_own, own, 0)), 0)


@jax.custom_vjp
def take(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows "... column" of `table` "row column" with the indices `rows`.

    The terms of the table's gradient are added in float32: a frequent token has hundreds of them.
    """
    return table[rows]


def _add_at_rows(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, rows = kept
    return jnp.zeros(table.shape, jnp.float32).at[rows].add(gradient.astype(jnp.float32)).astype(table.dtype), None


take.defvjp(lambda table, rows: (table[rows], (table, rows)), _add_at_rows)


def take_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Elements of `x` "batch seq hidden" at `positions` "batch position": "batch position hidden"."""
    batch, seq, hidden = x.shape
    return take(x.reshape(batch * seq, hidden), jnp.arange(batch)[:, None] * seq + positions)
