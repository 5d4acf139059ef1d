"""LLaMA 1, 2 and 3: RMS norms, rotary positions, grouped-query attention, SwiGLU, no biases.

Source: Touvron et al. 2023 (arXiv 2302.13971, 2307.09288); Grattafiori et al. 2024 (arXiv 2407.21783).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.block import Block, FeedForward, Heads, SelfAttention
from jaxpipe.models.choices import attend_of, check_choices, check_heads
from jaxpipe.models.ends import Embedding, Head
from jaxpipe.models.linear import initial_deviation
from jaxpipe.models.norms import RMSNorm
from jaxpipe.models.rotary import RotaryScaling, frequencies, rotate


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and choices of a LLaMA.

    Attributes:
        num_layers: transformer layers, >= 1.
        hidden: size of the residual stream; `num_heads` divides it.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        feed_forward: size between the products of the feed forward.
        vocab_size: tokens are 0 .. vocab_size - 1.
        tie_embeddings: whether the logits use the token table in place of a kernel of their own.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched for long contexts, or None.
        norm_epsilon: added to the mean square in the norms.
        attention, recompute: as in `GPTConfig`.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int
    vocab_size: int
    tie_embeddings: bool = False
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    norm_epsilon: float = 1e-5
    attention: str = "xla"
    recompute: str = "none"

    def __post_init__(self) -> None:
        """Checks."""
        check_heads(hidden=self.hidden, num_heads=self.num_heads)
        check_choices(attention=self.attention, recompute=self.recompute)
        if self.hidden // self.num_heads % 2:
            raise ConfigError(
                f"model.hidden={self.hidden} with model.num_heads={self.num_heads}\n"
                "  rule rotary-pairs: the size of a head is even, since positions rotate pairs of its dims\n"
                f"      {self.hidden} / {self.num_heads} = {self.hidden // self.num_heads}\n"
                f"  repair: set model.hidden={self.hidden + self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            nearest = min(legal, key=lambda n: abs(n - self.num_kv_heads))
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}\n"
                "  rule grouped-heads: every key-value head serves as many query heads\n"
                f"  repair: set model.num_kv_heads={nearest}, the nearest legal value"
            )

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything: never, as published."""
        return False

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """A token table."""
        return Embedding(
            vocab_size=self.vocab_size,
            num_positions=0,
            hidden=self.hidden,
            dropout_rate=0.0,
            tensor=tensor,
            rngs=rngs,
        )

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer; initial kernels as GPT's."""
        deviation = initial_deviation(self.hidden)
        to_stream = deviation / (2 * self.num_layers) ** 0.5
        head_size = self.hidden // self.num_heads
        attention = SelfAttention(
            self._new_norm(),
            hidden=self.hidden,
            heads=Heads(self.num_heads, self.num_kv_heads, head_size),
            bias=False,
            attend=attend_of(self.attention, self.recompute),
            rotate=partial(rotate, frequencies=frequencies(head_size, self.rope_theta, self.rope_scaling)),
            dropout_rate=0.0,
            deviation=deviation,
            output_deviation=to_stream,
            tensor=tensor,
            rngs=rngs,
        )
        feed_forward = FeedForward(
            self._new_norm(),
            hidden=self.hidden,
            width=self.feed_forward,
            names=("gate", "up"),
            activation=swiglu,
            bias=False,
            deviation=deviation,
            output_deviation=to_stream,
            tensor=tensor,
            rngs=rngs,
        )
        return Block(attention, feed_forward, dropout_rate=0.0, tensor=tensor)

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss."""
        return Head(
            self._new_norm(),
            vocab_size=self.vocab_size,
            hidden=self.hidden,
            tie_embeddings=self.tie_embeddings,
            tensor=tensor,
            rngs=rngs,
        )

    def _new_norm(self) -> RMSNorm:
        return RMSNorm(self.hidden, epsilon=self.norm_epsilon)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gated activation of SwiGLU; source: Shazeer 2020."""
    return jax.nn.silu(gate) * up
