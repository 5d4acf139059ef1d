"""Embedding and head of a language model: tokens to residual stream, residual stream to what the logits are made of.

Over a `tensor` axis each device holds some rows of the token table and of the head's kernel: some tokens of the
vocabulary. Both cut off their large table, so that its gradient can be added straight to its running sum: the
embedding has the lookup apart from the rest, the head ends before the logits. Left to others: logits and loss
(`cross_entropy`), BERT's head (`bert`), and how the pieces make a model (`language_model`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxpipe.mesh import Randomness, TensorAxis
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.models.cross_entropy import logits
from jaxpipe.models.dropout import Site, drop
from jaxpipe.models.linear import LayerNorm, RMSNorm, add, initial_deviation

Microbatch = dict[str, jax.Array]


class Embedding(nnx.Module):
    """A learned table of tokens and, if their number is not 0, of positions and of token types.

    Args:
        num_positions: the longest sequence; 0: positions are not learned.
        num_token_types: "token_types" are 0 .. num_token_types - 1; 0: there are none.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        *,
        num_positions: int = 0,
        num_token_types: int = 0,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        def table(num_rows: int) -> nnx.Param:
            rows = jax.random.normal(rngs.params(), (num_rows, anatomy.hidden))
            return nnx.Param(initial_deviation(anatomy.hidden) * rows)

        self.token = new_token_table(anatomy, rngs)
        if num_positions:
            self.position = table(num_positions)
        if num_token_types:
            self.token_type = table(num_token_types)
        self.dropout_rate = anatomy.embedding_dropout
        self.tensor = tensor

    def __call__(self, microbatch: Microbatch, random: Randomness | None) -> jax.Array:
        """The residual stream "batch local_seq hidden".

        Args:
            microbatch: "tokens"; "positions" if they are not 0, 1, ...; "token_types" if the model has such types; each
                int32 "batch seq".
        """
        return self.with_rows(self.rows(microbatch), microbatch, random)

    def rows(self, microbatch: Microbatch) -> jax.Array:
        """Rows of the tokens in this device's part of the table, zeros for others' tokens: "batch seq hidden"."""
        row, is_own = self._own(microbatch["tokens"])
        rows = take(self.token[...], row)
        # Zeros, since the devices of `tensor` add their rows: one of them has the token's.
        return rows if is_own is None else jnp.where(is_own[..., None], rows, 0)

    def with_rows(self, rows: jax.Array, microbatch: Microbatch, random: Randomness | None) -> jax.Array:
        """The residual stream "batch local_seq hidden" from `rows`: all but the lookup of tokens."""
        return self.with_own_rows(self.tensor.scatter_sum(rows, 1), microbatch, random)

    def with_own_rows(self, x: jax.Array, microbatch: Microbatch, random: Randomness | None) -> jax.Array:
        """The residual stream from the rows of this device's positions, "batch local_seq hidden"."""
        if hasattr(self, "position") and "positions" in microbatch:
            x = x + take(self.position[...], self.tensor.own(microbatch["positions"]))
        elif hasattr(self, "position") and self.tensor.context.size > 1:
            x = add(x, take(self.position[...], self.tensor.positions(x.shape[1])))
        elif hasattr(self, "position"):
            first_position = self.tensor.index() * x.shape[1]
            x = add(x, lax.dynamic_slice_in_dim(self.position[...], first_position, x.shape[1]))
        if hasattr(self, "token_type"):
            # One row is of all types: a table of one has no second segment.
            row = jnp.minimum(self.tensor.own(microbatch["token_types"]), self.token_type.shape[0] - 1)
            x = x + take(self.token_type[...], row)
        return drop(x, random, rate=self.dropout_rate, site=Site.EMBEDDING, positions=self.tensor.positions)

    def add_at_rows(self, total: jax.Array, microbatch: Microbatch, gradient: jax.Array) -> jax.Array:
        """The running sum `total` of the table's gradient, with the gradient of `rows` added in place."""
        row, is_own = self._own(microbatch["tokens"])
        # Others' tokens have row 0 here, whose gradient must not get theirs.
        return _add_at(total, row, gradient if is_own is None else jnp.where(is_own[..., None], gradient, 0))

    def _own(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The row of each token here in this device's part of the table, 0 of other parts; and which are its own."""
        tokens = self.tensor.context.own(tokens, 1)
        if self.tensor.num_vocab_parts == 1:
            return tokens, None
        num_rows = self.token.shape[0]
        row = tokens - self.tensor.vocab_index() * num_rows
        is_own = (row >= 0) & (row < num_rows)
        # Row 0 for others' tokens keeps the index in range; `is_own` masks what is read and added there.
        return jnp.where(is_own, row, 0), is_own


class Head(nnx.Module):
    """Final norm, and the logits' kernel; with tied embeddings it has none, and logits use the token table.

    Args:
        further: what predicts a further token, a `jaxpipe.models.multi_token.FurtherToken`; None: nothing does.
    """

    def __init__(
        self,
        norm: LayerNorm | RMSNorm,
        anatomy: Anatomy,
        *,
        tie_embeddings: bool,
        further: Callable[[], nnx.Module] | None = None,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        self.norm = norm
        self.vocab_size = anatomy.vocab_size
        self.tensor = tensor
        if not tie_embeddings:
            self.kernel = new_token_table(anatomy, rngs)
        if further:
            self.further = further()

    def features(self, x: jax.Array, microbatch: Microbatch, *ahead: jax.Array) -> tuple[Any, dict[str, Any]]:
        """The gathered stream "batch seq hidden" that the kernel multiplies, and no further losses.

        With the rows of the next tokens, `ahead`, also that of a further token, and the losses of its block.
        """
        normed = self.norm.apply(x, self.norm.arrays())
        features = self.tensor.gather(normed, 1)
        if not ahead:
            return features, {}
        further, losses = self.further(normed, *ahead, microbatch)
        return (features, further), losses

    def own_targets(self, targets: jax.Array) -> jax.Array:
        """Those of `targets` "batch seq" that this device's features predict, where `context` splits sequences."""
        return self.tensor.context.own(targets, 1)

    def all_targets(self, x: jax.Array, num_targets: int) -> jax.Array:
        """Numbers "batch target" of all targets, from those of `own_targets`."""
        del num_targets
        return self.tensor.context.whole(x, 1)

    def losses(self, words: Any, others: dict[str, Any]) -> Any:
        """The result of the model's head from the words' losses; there are others where these are several."""
        return {**words, **others} if isinstance(words, dict) else words

    def logits(self, x: jax.Array, token_table: jax.Array | None) -> jax.Array:
        """The logits "batch seq vocab" of `x` "batch seq hidden", float32, on one device."""
        kernel = self.kernel[...] if token_table is None else token_table
        # Rows from `vocab_size` on fill the table up for its split and are no tokens.
        return logits(self.norm.apply(x, self.norm.arrays()), kernel)[..., : self.vocab_size]


def new_token_table(anatomy: Anatomy, rngs: nnx.Rngs) -> nnx.Param:
    """Table "num_rows hidden" with a random row for each token, the same for any `num_rows`, and zeros below."""
    hidden = anatomy.hidden
    vocab_size = anatomy.vocab_size
    # Drawn for the tokens alone and padded after: the same numbers for every split of the table.
    rows = initial_deviation(hidden) * jax.random.normal(rngs.params(), (vocab_size, hidden))
    return nnx.Param(jnp.pad(rows, ((0, anatomy.num_rows - vocab_size), (0, 0))), split=0)


@jax.custom_vjp
def take(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows "... column" of `table` "row column" with the indices `rows`.

    The terms of the table's gradient are added in float32: a frequent token has hundreds of them.
    """
    return table[rows]


def _add_at_rows(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, rows = kept
    # Float32, as a frequent token has hundreds of terms; rounded once, at the end.
    return _add_at(jnp.zeros(table.shape, jnp.float32), rows, gradient).astype(table.dtype), None


def _add_at(total: jax.Array, rows: jax.Array, gradient: jax.Array) -> jax.Array:
    """Returns `total` "row column", float32, with the terms `gradient` "... column" added at the indices `rows`."""
    return total.at[rows].add(gradient.astype(total.dtype))


take.defvjp(lambda table, rows: (table[rows], (table, rows)), _add_at_rows)


def take_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Elements of `x` "batch seq hidden" at `positions` "batch position": "batch position hidden"."""
    batch, seq, hidden = x.shape
    # One axis of rows, so that `take` and its float32 gradient serve here too.
    return take(x.reshape(batch * seq, hidden), jnp.arange(batch)[:, None] * seq + positions)
