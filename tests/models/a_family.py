"""A family in one file: attention and feed forward side by side, gated GELU, rotary positions, grouped queries.

The layers are those of PaLM (Chowdhery et al., 2022, section 2) but for GELU in the gate and a norm for each half:

    y = x + attention(norm_1(x)) + feed_forward(norm_2(x))

`base_config("tests/models/a_family.py")` is a config of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx

from jaxpipe.mesh import Randomness, TensorAxis
from jaxpipe.models import Anatomy, Family
from jaxpipe.models.block import FeedForward, SelfAttention
from jaxpipe.models.choices import CHOICES, TOKENS, attend_of, check_choices, check_heads, num_token_rows, num_valid
from jaxpipe.models.embedding_and_head import Embedding, Head
from jaxpipe.models.linear import RMSNorm, initial_deviation
from jaxpipe.models.rotary import frequencies, rotate


@dataclass(frozen=True)
class SideBySideConfig:
    """Sizes and choices of a model."""

    num_layers: int
    hidden: int
    num_heads: int
    num_groups: int
    expansion: int
    vocab_size: int
    vocab_multiple: int = 1
    tie_embeddings: bool = True
    attention: str = "xla"
    recompute: str = "none"

    def __post_init__(self) -> None:
        """Checks."""
        check_heads(hidden=self.hidden, num_heads=self.num_heads)
        check_choices(attention=self.attention, recompute=self.recompute)

    @property
    def anatomy(self) -> Anatomy:
        """What the model is made of."""
        return Anatomy(
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_groups,
            head_size=self.hidden // self.num_heads,
            width=self.expansion * self.hidden,
            num_up=2,
            vocab_size=self.vocab_size,
            num_rows=num_token_rows(self.vocab_size, self.vocab_multiple),
            parallel=True,
        )

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """How many targets are valid."""
        return num_valid(batch["targets"])

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """A token table."""
        return Embedding(self.anatomy, tensor=tensor, rngs=rngs)

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer."""
        anatomy = self.anatomy
        alike = {"output_deviation": initial_deviation(self.hidden), "bias": False, "tensor": tensor, "rngs": rngs}
        attention = SelfAttention(
            RMSNorm(self.hidden),
            anatomy,
            output_bias=False,
            attend=attend_of(self.attention, self.recompute),
            rotate=partial(rotate, frequencies=frequencies(anatomy.head_size, 10000.0)),
            **alike,
        )
        norm = RMSNorm(self.hidden)
        feed_forward = FeedForward(norm, anatomy, names=("gate", "up"), activation=geglu, **alike)
        return SideBySide(attention, feed_forward)

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss."""
        return Head(RMSNorm(self.hidden), self.anatomy, tie_embeddings=self.tie_embeddings, tensor=tensor, rngs=rngs)


def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Gated GELU; source: Shazeer 2020."""
    return jax.nn.gelu(gate) * up


class SideBySide(nnx.Module):
    """`x + attention(x) + feed_forward(x)`."""

    def __init__(self, attention: SelfAttention, feed_forward: FeedForward):
        self.attention, self.feed_forward = attention, feed_forward

    def __call__(self, x: jax.Array, places: dict[str, jax.Array], random: Randomness | None) -> jax.Array:
        """The residual stream "batch local_seq hidden" after this layer."""
        return x + self.attention(x, places, random) + self.feed_forward(x, places)


SIDE_BY_SIDE = Family(
    name="side_by_side",
    fields={
        "num_layers": 8,
        "hidden": 128,
        "num_heads": 4,
        "num_groups": 2,  # key and value heads
        "expansion": 3,  # the feed forward's width, in hidden
        **TOKENS,
        "tie_embeddings": True,
        **CHOICES,
    },
    build=lambda fields, seq_len: SideBySideConfig(**fields),
)
