"""GPT: learned positions, layer norms, biases, GELU, dropout.

`LayerNormSizes` is the part in common with BERT: sizes and choices, the tables of the embedding, and the layer.
Source: Brown et al. 2020 (GPT-3), Megatron-LM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.models.block import Block, FeedForward, SelfAttention
from jaxpipe.models.choices import (
    ACTIVATIONS,
    CHOICES,
    DROPOUTS,
    TOKENS,
    attend_of,
    check_activation,
    check_choices,
    check_heads,
    num_token_rows,
    num_valid,
)
from jaxpipe.models.embedding_and_head import Embedding, Head
from jaxpipe.models.family import Family, Fields
from jaxpipe.models.linear import LayerNorm, output_deviation
from jaxpipe.models.lora import FIELDS, OF_ATTENTION, Lora, with_lora


@dataclass(frozen=True)
class LayerNormSizes:
    """Sizes and choices that GPT and BERT share; not a model by itself.

    Attributes:
        num_layers: transformer layers, >= 1.
        hidden: size of the residual stream; `num_heads` divides it.
        num_heads: attention heads.
        vocab_size: tokens are 0 .. vocab_size - 1.
        num_positions: learned positions; no sequence is longer.
        feed_forward: size between the matmuls of the feed forward; None: 4 hidden.
        activation: between these matmuls, a key of `jaxpipe.models.choices.ACTIVATIONS`.
        norm_epsilon: added to the variance in the norms.
        vocab_multiple: the rows of the token table are a multiple of this; those beyond the tokens have no effect.
        tie_embeddings: whether the logits use the token table in place of their own kernel.
        attention: a key of `jaxpipe.models.attention.ATTENTION`.
        recompute: recomputation in backward instead of saving: of nothing; of the attention scores and
            probabilities; or of the whole layer.
        embedding_dropout, attention_dropout, hidden_dropout: the fraction, in [0, 1), that training drops of the
            embeddings, of the attention probabilities, and of a layer's additions to the stream.
        lora: adapters, beside which all else is frozen; None: all is trained.

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
    lora: Lora | None = None
    splits_sequences: ClassVar[bool] = True
    # Last, where the field stands that BERT has in its place.
    num_token_types: ClassVar[int] = 0

    def __post_init__(self) -> None:
        """Raises ConfigError if the sizes and choices do not fit together."""
        check_heads(hidden=self.hidden, num_heads=self.num_heads)
        check_activation(self.activation)
        check_choices(attention=self.attention, recompute=self.recompute)
        if self.lora:
            self.lora.check((*OF_ATTENTION, "up", "down"), frozen={"gate": "is a matmul of gated feed forwards alone"})

    def layer_sizes(self, tensor: TensorAxis, microbatch_size: int, seq_len: int) -> tuple[int, ...]:
        """Sizes by which a layer's arrays and matmuls grow with the microbatch: see `Family.build`."""
        del tensor, seq_len
        return (microbatch_size,)

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of a causal model."""
        return Anatomy(
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads,
            head_size=self.hidden // self.num_heads,
            width=4 * self.hidden if self.feed_forward is None else self.feed_forward,
            num_up=1,
            vocab_size=self.vocab_size,
            num_rows=num_token_rows(self.vocab_size, self.vocab_multiple),
            centered_norms=True,
            embedding_dropout=self.embedding_dropout,
            attention_dropout=self.attention_dropout,
            hidden_dropout=self.hidden_dropout,
        )

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Token and position tables and, if `num_token_types` is not 0, one of token types."""
        numbers = {"num_positions": self.num_positions, "num_token_types": self.num_token_types}
        return Embedding(self.anatomy, **numbers, tensor=tensor, rngs=rngs)

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer."""
        anatomy = self.anatomy
        deviation = output_deviation(self.hidden, self.num_layers)
        attention = SelfAttention(
            LayerNorm(self.hidden, epsilon=self.norm_epsilon),
            anatomy,
            bias=True,
            output_bias=True,
            attend=attend_of(self.attention, self.recompute),
            rotate=None,
            output_deviation=deviation,
            lora=self.lora,
            tensor=tensor,
            rngs=rngs,
        )
        feed_forward = FeedForward(
            LayerNorm(self.hidden, epsilon=self.norm_epsilon),
            anatomy,
            names=("up",),
            activation=ACTIVATIONS[self.activation],
            bias=True,
            output_deviation=deviation,
            lora=self.lora,
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
        """Number of valid "targets" of a batch, int32."""
        return num_valid(batch["targets"])

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss."""
        norm = LayerNorm(self.hidden, epsilon=self.norm_epsilon)
        return Head(norm, self.anatomy, tie_embeddings=self.tie_embeddings, tensor=tensor, rngs=rngs)


def check_positions(fields: Fields, seq_len: int) -> None:
    """Raises ConfigError for sequences longer than the table of positions."""
    num_positions = fields["num_positions"]
    if num_positions is not None and num_positions < seq_len:
        raise ConfigError(
            f"model.num_positions={num_positions} with data.seq_len={seq_len}",
            rule="positions: every token of a sequence has a row in the table of positions",
            picture=f"tokens {num_positions} .. {seq_len - 1} have none",
            repair=f"set model.num_positions='auto', which is {seq_len}, or data.seq_len={num_positions}",
        )


def with_positions(fields: Fields, seq_len: int) -> Fields:
    """Returns `fields` with a position for each token of a sequence, unless they have a number."""
    # A word in the config came as None.
    return fields | {"num_positions": fields["num_positions"] or seq_len}


LAYER_NORM_FIELDS = {
    "num_layers": 8,  # transformer layers
    "hidden": 128,  # size of the residual stream
    "num_heads": 2,  # divides hidden
    "feed_forward": "auto",  # size between the matmuls of the feed forward; "auto": 4 hidden
    **TOKENS,
    "num_positions": "auto",  # learned positions, data.seq_len or more; "auto": data.seq_len
    "norm_epsilon": 1e-5,  # added to the variance in the norms
    "tie_embeddings": True,  # the logits use the token table
    "activation": "gelu_tanh",  # between the matmuls of the feed forward: "gelu_tanh", "gelu" (erf), "relu"
}
LAYER_NORM_WORDS = {"feed_forward": "auto", "num_positions": "auto"}

GPT = Family(
    name="gpt",
    fields={**LAYER_NORM_FIELDS, **DROPOUTS, **CHOICES, **FIELDS},
    words=LAYER_NORM_WORDS,
    build=lambda fields, seq_len: GPTConfig(**with_lora(with_positions(fields, seq_len))),
    check=check_positions,
    example="configs/quickstart.py",
)
