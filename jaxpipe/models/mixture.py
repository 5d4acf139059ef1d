"""Mixtral and Qwen3-MoE: LLaMA's layers with a feed forward of experts.

Source: Jiang et al., Mixtral of Experts, 2024 (arXiv 2401.04088); Qwen3 technical report, 2025 (arXiv 2505.09388).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.models.experts import Experts, Routing
from jaxpipe.models.family import Family
from jaxpipe.models.linear import output_deviation
from jaxpipe.models.llama import LLAMA, LlamaConfig, swiglu
from jaxpipe.models.lora import OF_ATTENTION, with_lora
from jaxpipe.models.rotary import (
    RotaryScaling,  # noqa: F401 - the reference evaluates the inherited annotations in this module
    check_rotary_scaling,
    with_rotary_scaling,
)


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """Sizes and choices of a model whose every layer has experts; `feed_forward` is the width of one.

    Attributes:
        num_experts: experts of a layer, >= 2.
        experts_per_token: those that a token goes to, 1 to `num_experts`.
        bias_rate: what a step changes each expert's bias by: see `jaxpipe.models.experts.Routing`; 0: there is none.
        normalize_weights, balance_loss, z_loss: see `jaxpipe.models.experts.Routing`.
        dispatch: "dropless", or "capacity" with `capacity_factor`: see `jaxpipe.models.dispatch`.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    normalize_weights: bool = True
    balance_loss: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0
    dispatch: str = "dropless"
    capacity_factor: float = 1.25

    def __post_init__(self) -> None:
        """Raises ConfigError if the sizes and choices do not fit together."""
        super().__post_init__()
        if self.num_experts < 2:
            raise ConfigError(
                f"model.num_experts={self.num_experts}",
                rule="experts: a layer of a mixture has two experts or more",
                repair="set model.num_experts=2 or more, or model.family='llama' for one feed forward",
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            nearest = min(max(self.experts_per_token, 1), self.num_experts)
            raise ConfigError(
                f"model.experts_per_token={self.experts_per_token} of model.num_experts={self.num_experts}",
                rule="chosen-experts: a token goes to 1 .. model.num_experts experts",
                repair=f"set model.experts_per_token={nearest}",
            )

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of the model."""
        return replace(
            super().anatomy,
            num_experts=self.num_experts,
            experts_per_token=self.experts_per_token,
            capacity_factor=self.routing.capacity_factor,
        )

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Those of attention: kernels of experts, and routers, have no adapters."""
        return OF_ATTENTION

    @property
    def routing(self) -> Routing:
        """How its routers choose."""
        return Routing(
            self.num_experts,
            self.experts_per_token,
            self.normalize_weights,
            self.balance_loss,
            self.z_loss,
            self.capacity_factor if self.dispatch == "capacity" else None,
            self.bias_rate > 0,
        )

    def layer_sizes(self, tensor: TensorAxis, microbatch_size: int, seq_len: int) -> tuple[int, ...]:
        """Sizes by which a layer's arrays and matmuls grow with the microbatch: see `Family.build`."""
        local_tokens = seq_len // tensor.context.size
        return *self.routing.dispatch(tensor.expert).sizes(microbatch_size, local_tokens), microbatch_size

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """Number of valid "targets" of a batch, int32; of all that routers sum, the number of tokens but padding."""
        of_layers = (*self.routing.losses, *self.routing.measures)
        is_token = batch.get("is_token")
        # Of all positions, valid target or not: a router also chooses for tokens whose prediction does not count.
        num_tokens = math.prod(batch["targets"].shape) if is_token is None else jnp.sum(is_token, dtype=jnp.int32)
        return {"words": super().num_losses(batch)} | dict.fromkeys(of_layers, num_tokens)

    def new_feed_forward(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Router and experts."""
        return Experts(
            self._new_norm(),
            self.anatomy,
            routing=self.routing,
            activation=swiglu,
            num_layers=self.num_layers,
            output_deviation=output_deviation(self.hidden, self.num_layers),
            tensor=tensor,
            rngs=rngs,
        )


DISPATCH = ("dropless", "capacity")
_NOT_OF_EXPERTS = ("feed_forward_bias",)  # experts have no biases
_FIELDS = {
    **{name: value for name, value in LLAMA.fields.items() if name not in _NOT_OF_EXPERTS},
    "num_experts": 8,  # experts of a layer, each as wide as feed_forward
    "experts_per_token": 2,  # experts that a token goes to
    "normalize_weights": True,  # whether the weights of a token's experts are divided by their sum
    "balance_loss": 0.02,  # factor of the loss that balances the experts' loads, mean over layers; 0.0: none
    "dispatch": "dropless",  # or "capacity": an expert has rows for so many choices, the rest are dropped
    "capacity_factor": 1.25,  # of "capacity": rows of an expert, in terms of equal shares of the choices
    "bias_rate": 0.0,  # what a step adds to the bias of each expert with less load than the mean; 0.0: no bias
    "z_loss": 0.0,  # factor of the loss that keeps the routers' logits small, mean over layers; 0.0: none
}


def _family(name: str, *, example: str, **fields: Any) -> Family:
    return Family(
        name=name,
        fields={**_FIELDS, **fields},
        words=LLAMA.words,
        choices={**LLAMA.choices, "dispatch": DISPATCH},
        build=lambda fields, seq_len: MixtureConfig(**with_lora(with_rotary_scaling(fields))),
        check=check_rotary_scaling,
        example=example,
    )


MIXTRAL = _family("mixtral", example="configs/mixtral_8x7b.py")
QWEN3_MOE = _family("qwen3_moe", example="configs/qwen3_30b_a3b.py", query_key_norm=True, balance_loss=0.001)
