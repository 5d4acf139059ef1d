"""The layer that GPT and BERT share: layer norms, biases, one activation, dropout."""

from __future__ import annotations

from typing import Protocol

from flax import nnx

from jaxpipe.mesh import TensorAxis
from jaxpipe.models.activations import ACTIVATIONS
from jaxpipe.models.block import Block, FeedForward, Heads, SelfAttention
from jaxpipe.models.choices import attend_of
from jaxpipe.models.linear import initial_deviation
from jaxpipe.models.norms import LayerNorm


class Choices(Protocol):
    """What the layer asks of a config; see `GPTConfig`."""

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        ...

    @property
    def hidden(self) -> int:
        """Size of the residual stream."""
        ...

    @property
    def num_heads(self) -> int:
        """Attention heads."""
        ...

    @property
    def feed_forward(self) -> int | None:
        """Size between the products of the feed forward; None: 4 hidden."""
        ...

    @property
    def activation(self) -> str:
        """Between these products."""
        ...

    @property
    def norm_epsilon(self) -> float:
        """Added to the variance in the norms."""
        ...

    @property
    def attention(self) -> str:
        """How to attend."""
        ...

    @property
    def recompute(self) -> str:
        """What backward computes again."""
        ...

    @property
    def attention_dropout(self) -> float:
        """Dropped of the attention probabilities."""
        ...

    @property
    def hidden_dropout(self) -> float:
        """Dropped of what the layer adds to the stream."""
        ...


def layer_norm_block(config: Choices, *, causal: bool, tensor: TensorAxis, rngs: nnx.Rngs) -> Block:
    """One layer; the products back to the stream start smaller by sqrt(2 * num_layers), as GPT-2's and Megatron's."""
    hidden, deviation = config.hidden, initial_deviation(config.hidden)
    to_stream = deviation / (2 * config.num_layers) ** 0.5
    attention = SelfAttention(
        LayerNorm(hidden, epsilon=config.norm_epsilon),
        hidden=hidden,
        heads=Heads(config.num_heads, config.num_heads, hidden // config.num_heads),
        bias=True,
        output_bias=True,
        attend=attend_of(config.attention, config.recompute),
        causal=causal,
        window=None,
        rotate=None,
        dropout_rate=config.attention_dropout,
        deviation=deviation,
        output_deviation=to_stream,
        tensor=tensor,
        rngs=rngs,
    )
    feed_forward = FeedForward(
        LayerNorm(hidden, epsilon=config.norm_epsilon),
        hidden=hidden,
        width=4 * hidden if config.feed_forward is None else config.feed_forward,
        names=("up",),
        activation=ACTIVATIONS[config.activation],
        bias=True,
        deviation=deviation,
        output_deviation=to_stream,
        tensor=tensor,
        rngs=rngs,
    )
    return Block(attention, feed_forward, dropout_rate=config.hidden_dropout, tensor=tensor)
