"""GPT: learned positions, layer norms, biases, GELU, dropout; source: Brown et al. 2020 (GPT-3), Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from flax import nnx

from jaxpipe.mesh import TensorAxis
from jaxpipe.models.block import Block, FeedForward, Heads, SelfAttention
from jaxpipe.models.choices import attend_of, check_choices, check_heads
from jaxpipe.models.ends import Embedding, Head
from jaxpipe.models.linear import initial_deviation
from jaxpipe.models.norms import LayerNorm


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a GPT.

    Attributes:
        num_layers: transformer layers, >= 1.
        hidden: size of the residual stream; `num_heads` divides it.
        num_heads: attention heads.
        vocab_size: tokens are 0 .. vocab_size - 1.
        seq_len: learned positions; the longest sequence.
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
    seq_len: int
    tie_embeddings: bool = True
    attention: str = "xla"
    recompute: str = "none"
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Checks."""
        check_heads(hidden=self.hidden, num_heads=self.num_heads)
        check_choices(attention=self.attention, recompute=self.recompute)

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return max(self.embedding_dropout, self.attention_dropout, self.hidden_dropout) > 0

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Token and position tables."""
        return Embedding(
            vocab_size=self.vocab_size,
            num_positions=self.seq_len,
            hidden=self.hidden,
            dropout_rate=self.embedding_dropout,
            tensor=tensor,
            rngs=rngs,
        )

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer; the products back to the stream start smaller by sqrt(2 * num_layers), as GPT-2's."""
        deviation = initial_deviation(self.hidden)
        to_stream = deviation / (2 * self.num_layers) ** 0.5
        attention = SelfAttention(
            LayerNorm(self.hidden),
            hidden=self.hidden,
            heads=Heads(self.num_heads, self.num_heads, self.hidden // self.num_heads),
            bias=True,
            attend=attend_of(self.attention, self.recompute),
            rotate=None,
            dropout_rate=self.attention_dropout,
            deviation=deviation,
            output_deviation=to_stream,
            tensor=tensor,
            rngs=rngs,
        )
        feed_forward = FeedForward(
            LayerNorm(self.hidden),
            hidden=self.hidden,
            width=4 * self.hidden,
            names=("up",),
            activation=gelu,
            bias=True,
            deviation=deviation,
            output_deviation=to_stream,
            tensor=tensor,
            rngs=rngs,
        )
        return Block(attention, feed_forward, dropout_rate=self.hidden_dropout, tensor=tensor)

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss."""
        return Head(
            LayerNorm(self.hidden),
            vocab_size=self.vocab_size,
            hidden=self.hidden,
            tie_embeddings=self.tie_embeddings,
            tensor=tensor,
            rngs=rngs,
        )


def gelu(x: jax.Array) -> jax.Array:
    """GELU in its tanh form, as GPT-2's."""
    return jax.nn.gelu(x, approximate=True)
