"""DeepSeek-V2 and -V3: latent attention, dense first layers, and then experts beside a feed forward that all share.

Source: DeepSeek-V2, 2024 (arXiv 2405.04434), section 2; DeepSeek-V3, 2024 (arXiv 2412.19437), section 2.1; numbers as
in transformers, models/deepseek_v2 and models/deepseek_v3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, ClassVar

from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.layer_kinds import ONE_KIND, Pattern
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.models.block import Block, FeedForward
from jaxpipe.models.deepseek_checks import check_deepseek, check_deepseek_fields
from jaxpipe.models.embedding_and_head import Head
from jaxpipe.models.experts import Experts
from jaxpipe.models.family import Family
from jaxpipe.models.latent_attention import HeadSizes, LatentAttention
from jaxpipe.models.linear import output_deviation
from jaxpipe.models.llama import swiglu
from jaxpipe.models.lora import FIELDS as LORA_FIELDS
from jaxpipe.models.lora import (
    Lora,  # noqa: F401 - the reference evaluates the inherited annotations in this module
)
from jaxpipe.models.mixture import MIXTRAL, MixtureConfig
from jaxpipe.models.multi_token import FurtherToken, further_losses, num_further_losses
from jaxpipe.models.rotary import (
    RotaryScaling,  # noqa: F401 - likewise
    frequencies,
    rotate,
    with_rotary_scaling,
)
from jaxpipe.models.routing import SCORES, Routing

# Names of the feed forwards of layers of kind 0 and 1.
EXPERTS = "experts"
DENSE = "dense"


@dataclass(frozen=True)
class DeepseekConfig(MixtureConfig):
    """Sizes and choices of a DeepSeek-V2 or -V3; `feed_forward` is the width of one expert.

    Attributes:
        num_dense: so many first layers have one feed forward and no experts, 0 to `num_layers` - 1.
        dense_width: its width.
        num_shared: experts that every token goes through beside the chosen ones.
        plain_size, rotary_size, value_size, latent_size, query_latent_size: see `jaxpipe.models.latent_attention`.
        scores, num_groups, groups_per_token, weight_scale: see `jaxpipe.models.routing.Routing`.
        score_mscale: scores are multiplied by the square of 0.1 x it x ln(rope_scaling.factor) + 1; 0.0: they are not.
        mtp_factor: of the loss of a module that predicts a further token (`jaxpipe.models.multi_token`); 0.0: none.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    num_dense: int = 1
    dense_width: int = 10944
    num_shared: int = 1
    plain_size: int = 128
    rotary_size: int = 64
    value_size: int = 128
    latent_size: int = 512
    query_latent_size: int | None = None
    scores: str = "sigmoid"
    num_groups: int = 1
    groups_per_token: int = 1
    weight_scale: float = 1.0
    score_mscale: float = 0.0
    mtp_factor: float = 0.0

    def __post_init__(self) -> None:
        """Raises ConfigError if the sizes and choices do not fit together."""
        super().__post_init__()
        check_deepseek(self)

    def _check_pairs(self) -> None:
        if self.rotary_size % 2:
            raise ConfigError(
                f"model.rotary_size={self.rotary_size} is odd",
                rule="rotary-pairs: the part that positions turn is even, since they rotate pairs of its dims",
                repair=f"set model.rotary_size={self.rotary_size + 1}",
            )

    @property
    def head_sizes(self) -> HeadSizes:
        """Sizes of heads and latents."""
        return HeadSizes(
            self.num_heads,
            self.plain_size,
            self.rotary_size,
            self.value_size,
            self.latent_size,
            self.query_latent_size,
        )

    @cached_property
    def kinds(self) -> tuple[DeepseekConfig, ...]:
        """Configs of models whose layers are all of one kind: with experts, and dense if some are."""
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)} | {"num_dense": 0}
        return (DeepseekConfig(**own), *((_DenseConfig(**own),) if self.num_dense else ()))

    @property
    def pattern(self) -> Pattern:
        """The kind of each layer, a place in `kinds`; each has a feed forward of its own."""
        return Pattern(first=(1,) * self.num_dense, only=((EXPERTS,), (DENSE,))) if self.num_dense else ONE_KIND

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of the model, whose layers have experts."""
        return replace(
            super().anatomy,
            head_size=self.head_sizes.query,
            value_size=self.value_size,
            rotary_size=self.rotary_size,
            kept=(1, self.latent_size + self.rotary_size, 0),
            attention_matmuls=self.head_sizes.matmuls(self.hidden),
            shared_width=self.num_shared * self.feed_forward,
        )

    @property
    def routing(self) -> Routing:
        """How its routers choose."""
        return replace(
            super().routing,
            scores=self.scores,
            num_groups=self.num_groups,
            groups_chosen=self.groups_per_token,
            scale=self.weight_scale,
        )

    @property
    def score_scale(self) -> float:
        """What scores are multiplied by, beside the root of the size of a query."""
        factor = self.rope_scaling.factor if self.rope_scaling else 1.0
        return (0.1 * self.score_mscale * math.log(max(factor, 1.0)) + 1.0) ** 2

    @property
    def layer_of_head(self) -> DeepseekConfig | None:
        """Of a model whose every layer is as the one that the head has; None: it has none."""
        return replace(self.kinds[0], mtp_factor=0.0) if self.mtp_factor else None

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """As of any mixture, and of a further token: the number to predict, and of tokens that have a next one."""
        return super().num_losses(batch) | num_further_losses(batch, self.further_losses)

    @property
    def further_losses(self) -> tuple[str, ...]:
        """The names of what the head loses and measures of a further token."""
        return further_losses((*self.routing.losses, *self.routing.measures)) if self.mtp_factor else ()

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss, and those of a further token."""

        def further() -> nnx.Module:
            return FurtherToken(
                (self._new_norm(), self._new_norm(), self._new_norm()),
                self.new_block(tensor, rngs),
                hidden=self.hidden,
                factor=self.mtp_factor,
                num_layers=self.num_layers - self.num_dense,
                tensor=tensor,
                rngs=rngs,
            )

        return Head(
            self._new_norm(),
            self.anatomy,
            tie_embeddings=self.tie_embeddings,
            further=further if self.mtp_factor else None,
            tensor=tensor,
            rngs=rngs,
        )

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer; initial kernels as GPT's."""
        attention = LatentAttention(
            self._new_norm(),
            self.hidden,
            self.head_sizes,
            rotate=partial(
                rotate,
                frequencies=frequencies(self.rotary_size, self.rope_theta, self.rope_scaling),
                amplitude=self.rope_scaling.amplitude if self.rope_scaling else 1.0,
                context=tensor.context,
            ),
            score_scale=self.score_scale,
            attention=self.attention,
            recompute=self.recompute,
            output_deviation=output_deviation(self.hidden, self.num_layers),
            tensor=tensor,
            rngs=rngs,
        )
        feed_forward = self.new_feed_forward(tensor, rngs)
        # Layers without experts have none of their losses and loads.
        zeros = self.routing.zeros if self._name == DENSE else None
        return Block(attention, feed_forward, dropout_rate=0.0, tensor=tensor, name=self._name, zeros=zeros)

    _name: ClassVar[str] = EXPERTS

    def new_feed_forward(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Router and experts, and those that are shared."""
        return Experts(
            self._new_norm(),
            self.anatomy,
            routing=self.routing,
            activation=swiglu,
            # Losses are means over the layers that have experts.
            num_layers=self.num_layers - self.num_dense,
            output_deviation=output_deviation(self.hidden, self.num_layers),
            shared_width=self.num_shared * self.feed_forward,
            tensor=tensor,
            rngs=rngs,
        )


@dataclass(frozen=True)
class _DenseConfig(DeepseekConfig):
    """The same with dense layers alone."""

    @cached_property
    def kinds(self) -> tuple[DeepseekConfig, ...]:
        """Itself."""
        return (self,)

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of the model."""
        return replace(
            super().anatomy,
            width=self.dense_width,
            width_field="dense_width",
            num_experts=1,
            experts_per_token=1,
            capacity_factor=None,
            shared_width=0,
        )

    def layer_sizes(self, tensor: TensorAxis, microbatch_size: int, seq_len: int) -> tuple[int, ...]:
        """Sizes by which a layer's arrays and matmuls grow with the microbatch: see `Family.build`."""
        del tensor, seq_len
        return (microbatch_size,)

    _name: ClassVar[str] = DENSE

    def new_feed_forward(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One feed forward."""
        return FeedForward(
            self._new_norm(),
            self.anatomy,
            names=("gate", "up"),
            activation=swiglu,
            bias=False,
            output_deviation=output_deviation(self.hidden, self.num_layers),
            tensor=tensor,
            rngs=rngs,
        )


_NOT_OF_LATENTS = (
    *LORA_FIELDS,
    "num_kv_heads",
    "head_size",
    "query_key_value_bias",
    "output_bias",
    "query_key_norm",
    "sliding_window",
    "full_first",
    "full_every",
)


DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    fields={
        **{name: value for name, value in MIXTRAL.fields.items() if name not in _NOT_OF_LATENTS},
        "num_dense": 1,  # so many first layers have one feed forward and no experts
        "dense_width": 384,  # its width; feed_forward is that of one expert
        "num_shared": 1,  # experts that every token goes through beside the chosen ones
        "plain_size": 64,  # of each query and key, the part without positions
        "rotary_size": 32,  # the part that positions turn, which all heads' keys share; even
        "value_size": 64,  # size of each value
        "latent_size": 64,  # columns of a token from which keys and values of all heads are expanded
        "query_latent_size": "none",  # those of queries; "none": queries are products with the stream
        "scores": "sigmoid",  # of experts, as DeepSeek-V3's; or "softmax", as DeepSeek-V2's, without a bias
        "num_groups": 1,  # of experts; a token chooses groups first,
        "groups_per_token": 1,  # so many, and then experts of these
        "weight_scale": 1.0,  # factor of the weights of a token's experts
        "mtp_factor": 0.0,  # of the loss of a module that predicts a further token, as 0.3; 0.0: there is none
        "score_mscale": 0.0,  # of yarn: attention's scores grow by (0.1 x it x ln(factor) + 1) squared; 0.0: not
        "balance_loss": 0.0,
        "bias_rate": 0.001,
    },
    words={"query_latent_size": "none"},
    choices={**MIXTRAL.choices, "scores": SCORES},
    build=lambda fields, seq_len: DeepseekConfig(num_kv_heads=fields["num_heads"], **with_rotary_scaling(fields)),
    check=check_deepseek_fields,
    example="configs/deepseek_v2_lite.py",
)
