"""gpt-oss: a mixture whose layers attend to a window and to all in turn, with sinks, biases and a clipped SwiGLU.

Source: gpt-oss-120b and gpt-oss-20b model card, 2025 (arXiv 2508.10925), section 2; numbers as in transformers,
models/gpt_oss/modeling_gpt_oss.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.experts import Experts
from jaxpipe.models.family import Family
from jaxpipe.models.linear import output_deviation
from jaxpipe.models.lora import (
    Lora,  # noqa: F401 - the reference evaluates the inherited annotations in this module
    with_lora,
)
from jaxpipe.models.mixture import MIXTRAL, MixtureConfig
from jaxpipe.models.rotary import (
    RotaryScaling,  # noqa: F401 - likewise
    check_rotary_scaling,
    with_rotary_scaling,
)


@dataclass(frozen=True)
class GptOssConfig(MixtureConfig):
    """Sizes and choices of a gpt-oss; all its matmuls but the logits' have biases.

    Attributes:
        swiglu_alpha, swiglu_limit: see `clipped_swiglu`.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    has_sinks: ClassVar[bool] = True
    attention: str = "chunked"
    query_key_value_bias: bool = True
    output_bias: bool = True
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        """Raises ConfigError if the sizes and choices do not fit together."""
        super().__post_init__()
        if self.attention != "chunked":
            raise ConfigError(
                f"model.attention={self.attention!r} with attention sinks",
                rule="attention-sinks: only 'chunked' has a term of its own in the softmax of each head",
                repair="set model.attention='chunked'",
            )
        if self.query_key_norm:
            raise ConfigError(
                "model.query_key_norm=True with attention sinks",
                rule="attention-sinks: queries and keys of a model with sinks have no norms",
                repair="set model.query_key_norm=False",
            )

    def new_feed_forward(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Router and experts."""
        return Experts(
            self._new_norm(),
            self.anatomy,
            routing=self.routing,
            activation=partial(clipped_swiglu, alpha=self.swiglu_alpha, limit=self.swiglu_limit),
            names=(("gate_up", 2),),
            bias=True,
            num_layers=self.num_layers,
            output_deviation=output_deviation(self.hidden, self.num_layers),
            tensor=tensor,
            rngs=rngs,
        )


def clipped_swiglu(gate_up: jax.Array, *, alpha: float, limit: float) -> jax.Array:
    """(up + 1) gate sigmoid(alpha gate), of columns gate, up, gate, up, ..., with values beyond `limit` cut off.

    Gates are cut off above alone.

    Example:
        >>> round(float(clipped_swiglu(jnp.array([9.0, 8.0]), alpha=1.702, limit=7.0)[0]), 3)
        56.0
    """
    pairs = gate_up.reshape(*gate_up.shape[:-1], -1, 2)
    gate = jnp.minimum(pairs[..., 0], limit)
    up = jnp.clip(pairs[..., 1], -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)


GPT_OSS = Family(
    name="gpt_oss",
    fields={
        **{name: value for name, value in MIXTRAL.fields.items() if name != "query_key_norm"},
        "attention": "chunked",  # the only one that has sinks
        "sliding_window": "128",
        "full_every": 2,
        "query_key_value_bias": True,
        "output_bias": True,
        "balance_loss": 0.001,
        "swiglu_alpha": 1.702,  # of the experts' activation: gate sigmoid(alpha gate) (up + 1)
        "swiglu_limit": 7.0,  # gates above, and ups beyond it on both sides, are cut off
    },
    words=MIXTRAL.words,
    choices=MIXTRAL.choices,
    build=lambda fields, seq_len: GptOssConfig(**with_lora(with_rotary_scaling(fields))),
    check=check_rotary_scaling,
    example="configs/gpt_oss_20b.py",
)
