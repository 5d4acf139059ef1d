"""GPT: learned positions, layer norms, biases, GELU, dropout.

`LayerNormSizes` is what BERT has in common with it: sizes and choices, the tables of the embedding, and the layer.
Source: Brown et al. 2020 (GPT-3), Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpipe.mesh import TensorAxis
from jaxpipe.models.block import Block, FeedForward, Heads, SelfAttention
from jaxpipe.models.choices import (
    ACTIVATIONS,
    attend_of,
    check_activation,
    check_choices,
    check_heads,
    num_valid,
    rows_of_words,
)
from jaxpipe.models.embedding_and_head import Embedding, Head
from jaxpipe.models.linear import LayerNorm, initial_deviation


@dataclass(frozen=True)
class LayerNormSizes:
    """Sizes and choices of a family; by itself no model.

    Attributes:
        num_layers: transformer layers, >= 1.
        hidden: size of the residual stream; `num_heads` divides it.
        num_heads: attention heads.
        vocab_size: tokens are 0 .. vocab_size - 1.
        num_positions: learned positions; no sequence is longer.
        feed_forward: size between the products of the feed forward; None: 4 hidden.
        activation: between these products, a key of `jaxpipe.models.choices.ACTIVATIONS`.
        norm_epsilon: added to the variance in the norms.
        vocab_multiple: the tables of words have a multiple of so many rows; those beyond the words change nothing.
        tie_embeddings: whether the logits use the token table in place of a kernel of their own.
        attention: a key of `jaxpipe.models.attention.ATTENTION`.
        recompute: what backward computes again in place of keeping it: nothing; the attention scores and
            probabilities; or the whole layer.
        embedding_dropout, attention_dropout, hidden_dropout: the part, in [0, 1), that training drops of the
            embeddings, of the attention probabilities, and of what a layer adds to the stream.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocab_size: int
    num_positions: int
    feed_forward: int | None = None
    activation: str = "gelu_tanh"
    norm_epsilon: float = 1e-5
    vocab_multiple: int = 1
    tie_embeddings: bool = True
    attention: str = "xla"
    recompute: str = "none"
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Checks."""
        check_heads(hidden=self.hidden, num_heads=self.num_heads)
        check_activation(self.activation)
        check_choices(attention=self.attention, recompute=self.recompute)

    @property
    def width(self) -> int:
        """Numbers between the products of the feed forward: `feed_forward`, or what it is derived as."""
        return 4 * self.hidden if self.feed_forward is None else self.feed_forward

    @property
    def size_of_head(self) -> int:
        """Numbers of a head."""
        return self.hidden // self.num_heads

    @property
    def num_rows(self) -> int:
        """Rows of the tables of words."""
        return rows_of_words(self.vocab_size, self.vocab_multiple)

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return max(self.embedding_dropout, self.attention_dropout, self.hidden_dropout) > 0

    def _embedding(self, tensor: TensorAxis, rngs: nnx.Rngs, *, num_token_types: int = 0) -> Embedding:
        """Token and position tables and, for so many, one of token types."""
        return Embedding(
            vocab_size=self.vocab_size,
            num_rows=self.num_rows,
            num_positions=self.num_positions,
            num_token_types=num_token_types,
            hidden=self.hidden,
            dropout_rate=self.embedding_dropout,
            tensor=tensor,
            rngs=rngs,
        )

    def _block(self, tensor: TensorAxis, rngs: nnx.Rngs, *, causal: bool) -> Block:
        """One layer; the products back to the stream start smaller by sqrt(2 * num_layers), as GPT-2's, Megatron's."""
        hidden, deviation = self.hidden, initial_deviation(self.hidden)
        to_stream = deviation / (2 * self.num_layers) ** 0.5
        attention = SelfAttention(
            LayerNorm(hidden, epsilon=self.norm_epsilon),
            hidden=hidden,
            heads=Heads(self.num_heads, self.num_heads, self.size_of_head),
            bias=True,
            output_bias=True,
            attend=attend_of(self.attention, self.recompute),
            causal=causal,
            window=None,
            rotate=None,
            dropout_rate=self.attention_dropout,
            deviation=deviation,
            output_deviation=to_stream,
            tensor=tensor,
            rngs=rngs,
        )
        feed_forward = FeedForward(
            LayerNorm(hidden, epsilon=self.norm_epsilon),
            hidden=hidden,
            width=self.width,
            names=("up",),
            activation=ACTIVATIONS[self.activation],
            bias=True,
            deviation=deviation,
            output_deviation=to_stream,
            tensor=tensor,
            rngs=rngs,
        )
        return Block(attention, feed_forward, dropout_rate=self.hidden_dropout, tensor=tensor)


@dataclass(frozen=True)
class GPTConfig(LayerNormSizes):
    """Sizes and choices of a GPT: those of `LayerNormSizes`, each explained there.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """How many of the batch's "targets" are valid, int32."""
        return num_valid(batch["targets"])

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Token and position tables."""
        return self._embedding(tensor, rngs)

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer, of causal attention."""
        return self._block(tensor, rngs, causal=True)

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss."""
        return Head(
            LayerNorm(self.hidden, epsilon=self.norm_epsilon),
            vocab_size=self.vocab_size,
            num_rows=self.num_rows,
            hidden=self.hidden,
            tie_embeddings=self.tie_embeddings,
            tensor=tensor,
            rngs=rngs,
        )
