"""LLaMA 1, 2 and 3, and models of the same layout: RMS norms, rotary positions, grouped-query attention, SwiGLU.

Biases, heads of another size, norms of queries and keys and a sliding window are choices of other models (Qwen2, Qwen3,
Mistral); LLaMA has none of them.
Source: Touvron et al. 2023 (arXiv 2302.13971, 2307.09288); Grattafiori et al. 2024 (arXiv 2407.21783); Jiang et
al. 2023 (Mistral 7B, arXiv 2310.06825), section 2, for the window.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar

import jax
from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.layer_kinds import Pattern
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.models.block import Block, FeedForward, SelfAttention
from jaxpipe.models.choices import (
    CHOICES,
    TOKENS,
    attend_normed_of,
    attend_of,
    check_choices,
    check_heads,
    num_token_rows,
    num_valid,
)
from jaxpipe.models.embedding_and_head import Embedding, Head
from jaxpipe.models.family import Family
from jaxpipe.models.linear import RMSNorm, output_deviation
from jaxpipe.models.lora import FIELDS, GATED, OF_ATTENTION, Lora, with_lora
from jaxpipe.models.rotary import (
    ROTARY_FIELDS,
    ROTARY_SCALINGS,
    RotaryScaling,
    check_rotary_scaling,
    frequencies,
    rotate,
    with_rotary_scaling,
)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and choices of a LLaMA.

    Attributes:
        num_layers: transformer layers, >= 1.
        hidden: size of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        feed_forward: size between the matmuls of the feed forward.
        vocab_size: tokens are 0 .. vocab_size - 1.
        head_size: size of each head, even; None: hidden / num_heads.
        vocab_multiple, tie_embeddings: see `LayerNormSizes`.
        query_key_value_bias, output_bias, feed_forward_bias: whether the matmuls to queries, keys and values, the
            matmul of attention back to the stream, and the feed forward's have biases.
        query_key_norm: whether each query and each key has an RMS norm before its rotation, with a scale that all heads
            share; as Qwen3.
        sliding_window: number of last keys that a query sees, itself included; None: all up to itself.
        full_first, full_every: layers without the window: so many first ones, and of the others each so manieth, as
            the second, fourth, ... for 2; 0: none.
        rope_theta: base of the rotary frequencies.
        rope_scaling: scaling of the frequencies for long contexts, or None.
        norm_epsilon: added to the mean square in the norms.
        attention, recompute, lora: see `LayerNormSizes`.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    splits_sequences: ClassVar[bool] = True
    has_sinks: ClassVar[bool] = False  # whether the softmax of each head has a further term

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    feed_forward: int
    vocab_size: int
    head_size: int | None = None
    vocab_multiple: int = 1
    tie_embeddings: bool = False
    query_key_value_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    query_key_norm: bool = False
    sliding_window: int | None = None
    full_first: int = 0
    full_every: int = 0
    rope_theta: float = 10000.0
    rope_scaling: RotaryScaling | None = None
    norm_epsilon: float = 1e-5
    attention: str = "xla"
    recompute: str = "none"
    lora: Lora | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError if the sizes and choices do not fit together."""
        check_choices(attention=self.attention, recompute=self.recompute)
        self._check_pairs()
        self._check_full()
        if self.lora:
            self.lora.check(self.lora_names, frozen=dict.fromkeys(GATED, "has no adapters in a mixture"))
        if self.num_heads % self.num_kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            nearest = min(legal, key=lambda n: abs(n - self.num_kv_heads))
            raise ConfigError(
                f"model.num_kv_heads={self.num_kv_heads} does not divide model.num_heads={self.num_heads}",
                rule="grouped-heads: every key-value head serves equally many query heads",
                repair=f"set model.num_kv_heads={nearest}, the nearest legal value",
            )

    @property
    def lora_names(self) -> tuple[str, ...]:
        """The matmuls of a layer that may have adapters."""
        return *OF_ATTENTION, *GATED

    def _check_full(self) -> None:
        for name in ("full_first", "full_every"):
            number = getattr(self, name)
            if number and self.sliding_window is None:
                raise ConfigError(
                    f"model.{name}={number} with model.sliding_window='none'",
                    rule="full-layers: layers without a window stand beside layers with one",
                    repair=f"set model.sliding_window, for example '128', or model.{name}=0",
                )
        if self.full_every == 1:
            raise ConfigError(
                "model.full_every=1",
                rule="full-layers: some layer has the window",
                repair="set model.full_every=2 for every second layer, or model.sliding_window='none' for all",
            )

    @cached_property  # plans ask for it thousands of times
    def kinds(self) -> tuple[LlamaConfig, ...]:
        """Configs of models whose layers are all of one kind: with the window, and without it if some have none."""
        alike = replace(self, full_first=0, full_every=0)
        return (alike,) if alike == self else (alike, replace(alike, sliding_window=None))

    @property
    def pattern(self) -> Pattern:
        """The kind of each layer, a place in `kinds`."""
        return Pattern((0,) * (self.full_every - 1) + (1,) if self.full_every else (0,), (1,) * self.full_first)

    def _check_pairs(self) -> None:
        if self.head_size is None:
            check_heads(hidden=self.hidden, num_heads=self.num_heads)
        if self.anatomy.head_size % 2 == 0:
            return
        rule = "rotary-pairs: the size of a head is even, since positions rotate pairs of its dims"
        if self.head_size is not None:
            raise ConfigError(
                f"model.head_size={self.head_size} is odd",
                rule=rule,
                repair=f"set model.head_size={self.head_size + 1}",
            )
        raise ConfigError(
            f"model.hidden={self.hidden} with model.num_heads={self.num_heads}",
            rule=rule,
            picture=f"{self.hidden} / {self.num_heads} = {self.anatomy.head_size}",
            repair=f"set model.hidden={self.hidden + self.num_heads}",
        )

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of the model."""
        return Anatomy(
            hidden=self.hidden,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.hidden // self.num_heads if self.head_size is None else self.head_size,
            width=self.feed_forward,
            num_up=2,
            vocab_size=self.vocab_size,
            num_rows=num_token_rows(self.vocab_size, self.vocab_multiple),
            window=self.sliding_window,
        )

    def layer_sizes(self, tensor: TensorAxis, microbatch_size: int, seq_len: int) -> tuple[int, ...]:
        """Sizes by which a layer's arrays and matmuls grow with the microbatch: see `Family.build`."""
        del tensor, seq_len
        return (microbatch_size,)

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """Number of valid "targets" of a batch, int32."""
        return num_valid(batch["targets"])

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Token table."""
        return Embedding(self.anatomy, tensor=tensor, rngs=rngs)

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer; initial kernels as GPT's."""
        head_size = self.anatomy.head_size
        attention = SelfAttention(
            self._new_norm(),
            self.anatomy,
            bias=self.query_key_value_bias,
            output_bias=self.output_bias,
            # With norms, the prepared queries and keys would be saved besides the raw ones; that attention prepares
            # them again.
            attend=(attend_normed_of if self.query_key_norm else attend_of)(self.attention, self.recompute),
            # A function and not a module, since queries and keys each get a norm of their own.
            head_norm=partial(RMSNorm, head_size, epsilon=self.norm_epsilon) if self.query_key_norm else None,
            rotate=partial(
                rotate,
                frequencies=frequencies(head_size, self.rope_theta, self.rope_scaling),
                amplitude=self.rope_scaling.amplitude if self.rope_scaling else 1.0,
                context=tensor.context,
            ),
            output_deviation=output_deviation(self.hidden, self.num_layers),
            has_sinks=self.has_sinks,
            lora=self.lora,
            tensor=tensor,
            rngs=rngs,
        )
        return Block(attention, self.new_feed_forward(tensor, rngs), dropout_rate=0.0, tensor=tensor)

    def new_feed_forward(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """A layer's part after attention."""
        return FeedForward(
            self._new_norm(),
            self.anatomy,
            names=("gate", "up"),
            activation=swiglu,
            bias=self.feed_forward_bias,
            output_deviation=output_deviation(self.hidden, self.num_layers),
            lora=self.lora,
            tensor=tensor,
            rngs=rngs,
        )

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss."""
        return Head(self._new_norm(), self.anatomy, tie_embeddings=self.tie_embeddings, tensor=tensor, rngs=rngs)

    def _new_norm(self) -> RMSNorm:
        return RMSNorm(self.hidden, epsilon=self.norm_epsilon)


def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Gated activation of SwiGLU; source: Shazeer 2020."""
    return jax.nn.silu(gate) * up


LLAMA = Family(
    name="llama",
    fields={
        "num_layers": 8,  # transformer layers
        "hidden": 128,  # size of the residual stream
        "num_heads": 2,  # query heads
        "num_kv_heads": 2,  # key and value heads; divides num_heads
        "head_size": "auto",  # of each head, even; "auto": hidden / num_heads
        "feed_forward": 384,  # size between the matmuls of the feed forward
        **TOKENS,
        "tie_embeddings": False,  # True: the logits use the token table
        "query_key_value_bias": False,  # True, as Qwen2: the matmuls to queries, keys and values have biases
        "output_bias": False,  # True: the matmul of attention back to the stream has one
        "feed_forward_bias": False,  # True: the matmuls of the feed forward have biases
        "query_key_norm": False,  # True, as Qwen3: each query and each key has an RMS norm
        "sliding_window": "none",  # how many keys a query sees, the last ones, itself included, as Mistral; "none": all
        "full_first": 0,  # so many first layers have no window, as some of Qwen2
        "full_every": 0,  # and of the others each so manieth: 2, every second; 0: none
        "rope_theta": 10000.0,  # base of the rotary frequencies
        **ROTARY_FIELDS,
        "norm_epsilon": 1e-5,  # added to the mean square in the norms
        **CHOICES,
        **FIELDS,
    },
    words={"head_size": "auto", "sliding_window": "none"},
    choices={"rope_scaling": tuple(ROTARY_SCALINGS)},
    build=lambda fields, seq_len: LlamaConfig(**with_lora(with_rotary_scaling(fields))),
    check=check_rotary_scaling,
    example="configs/llama_7b.py",
)
