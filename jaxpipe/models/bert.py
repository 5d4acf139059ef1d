"""BERT as Megatron-LM trains it: GPT's layers without the causal mask, masked tokens and sentence order.

In the head the stream is gathered whole over `tensor`, and only the predicted positions are used: 15 % of a head
over all positions. Unsplit parts are computed on every device; there the gradients for the logits are this device's
terms (`cross_entropy_sum`), and the order's loss, which is equal on all devices, passes its gradient on once.
Over `context` each device has the features and targets of equally many predicted positions, wherever these stand.
Source: Devlin et al., BERT, NAACL 2019, section 3.1 and appendix A.2; Shoeybi et al., Megatron-LM, 2019, section 5.3,
for where the norms stand; Lan et al., ALBERT, ICLR 2020, section 3.1, for the sentence order in place of the next
sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.models.choices import ACTIVATIONS, CHOICES, DROPOUTS, num_valid
from jaxpipe.models.cross_entropy import logits
from jaxpipe.models.embedding_and_head import Microbatch, new_token_table, take_positions
from jaxpipe.models.family import Family
from jaxpipe.models.gpt import (
    LAYER_NORM_FIELDS,
    LAYER_NORM_WORDS,
    LayerNormSizes,
    check_positions,
    with_positions,
)
from jaxpipe.models.linear import LayerNorm, Linear, initial_deviation
from jaxpipe.models.lora import FIELDS, with_lora


class BertHead(nnx.Module):
    """Final norm; transform and logits; and, with `sentence_order`, the first position's pooler and the order.

    Args:
        tie_embeddings: whether the logits' kernel is the token table, which the head then gets.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        *,
        activation: Callable[[jax.Array], jax.Array],
        norm_epsilon: float,
        tie_embeddings: bool,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        hidden = anatomy.hidden

        def linear(num_outputs: int) -> Linear:
            deviation = initial_deviation(hidden)
            return Linear(hidden, num_outputs, split=None, bias=True, deviation=deviation, rngs=rngs)

        self.norm = LayerNorm(hidden, epsilon=norm_epsilon)
        self.transform = linear(hidden)
        self.transform_norm = LayerNorm(hidden, epsilon=norm_epsilon)
        self.bias = nnx.Param(jnp.zeros(anatomy.num_rows), split=0)
        if not tie_embeddings:
            self.kernel = new_token_table(anatomy, rngs)
        if anatomy.sentence_order:
            self.pooler = linear(hidden)
            self.sentence_order = linear(2)
        self.vocab_size = anatomy.vocab_size
        self.activation = activation
        self.tensor = tensor

    def features(self, x: jax.Array, microbatch: Microbatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The transformed stream "batch predicted hidden" that the kernel multiplies, and the loss of the order if any.

        Args:
            x: "batch local_seq hidden".
            microbatch: "predicted", positions, int32 "batch predicted"; "sentence_order" int32 "batch"; an order below
                0 is not valid and counts nothing.
        """
        # Gathered whole, since a predicted position may lie on any device.
        whole = self.tensor.gather(self._normed(x), 1)
        features = self._transformed(self._predicted(whole, microbatch["predicted"]))
        if not hasattr(self, "pooler"):
            return features, {}
        order_logits = self._order_logits(whole)
        is_target = microbatch["sentence_order"][:, None] == jnp.arange(order_logits.shape[-1])
        # A mask in place of an index: a target below 0 hits no column and adds 0.
        order = -jnp.where(is_target, jax.nn.log_softmax(order_logits), 0.0).sum()
        # Every device computes the same order's loss; summed gradients would count it once for each.
        # Over `context` the first one's first token is that of the sequence.
        return features, {"sentence_order": self.tensor.context.counted_once(self.tensor.once(order))}

    def own_targets(self, targets: jax.Array) -> jax.Array:
        """See `Head`; the targets "batch predicted" of this device's features."""
        return self.tensor.context.part(self._padded(targets, -1), 1)

    def all_targets(self, x: jax.Array, num_targets: int) -> jax.Array:
        """See `Head`."""
        return self.tensor.context.gather(x, 1)[:, :num_targets]

    def losses(self, words: jax.Array, others: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Sums of the losses, float32: {"masked_lm"} and, with `sentence_order`, "sentence_order"."""
        return {"masked_lm": words, **others}

    def logits(self, x: jax.Array, token_table: jax.Array | None) -> dict[str, jax.Array]:
        """Logits of `x` "batch seq hidden": {"masked_lm": "batch seq vocab"} and "sentence_order": "batch 2"."""
        whole = self._normed(x)
        kernel = self.kernel[...] if token_table is None else token_table
        # Rows from `vocab_size` on fill the table up for its split and are no tokens.
        words = logits(self._transformed(whole), kernel, self.bias[...])[..., : self.vocab_size]
        if not hasattr(self, "pooler"):
            return {"masked_lm": words}
        return {"masked_lm": words, "sentence_order": self._order_logits(whole)}

    def _predicted(self, whole: jax.Array, positions: jax.Array) -> jax.Array:
        """The stream "batch local_predicted hidden" at this device's predicted positions.

        Args:
            whole: of all tokens of this device, "batch seq hidden".
            positions: all predicted ones, "batch predicted".
        """
        context = self.tensor.context
        if context.size == 1:
            return take_positions(whole, positions)
        place, is_own = context.found(positions, whole.shape[1] * context.size)
        rows = jnp.where(is_own[..., None], take_positions(whole, place), 0)
        # One device has a position's row, another one may predict its word.
        return context.scatter_sum(self._padded(rows, 0), 1)

    def _padded(self, x: jax.Array, filling: int) -> jax.Array:
        """`x` "batch predicted ..." with as many predicted positions as devices of `context` have equally many of."""
        missing = -x.shape[1] % self.tensor.context.size
        return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)], constant_values=filling)

    def _normed(self, x: jax.Array) -> jax.Array:
        return self.norm.apply(x, self.norm.arrays())

    def _transformed(self, x: jax.Array) -> jax.Array:
        return self.transform_norm.apply(self.activation(self.transform(x)), self.transform_norm.arrays())

    def _order_logits(self, whole: jax.Array) -> jax.Array:
        """Float32 logits "batch 2" of the stream "batch seq hidden", whose first position stands for the sequence."""
        # Float32 before the softmax, whose logarithm bfloat16 gives to three digits.
        return self.sentence_order(jnp.tanh(self.pooler(whole[:, 0]))).astype(jnp.float32)


@dataclass(frozen=True)
class BertConfig(LayerNormSizes):
    """Sizes and choices of a BERT: those of `LayerNormSizes`, explained there, and two of its own.

    Attributes:
        num_token_types: "token_types" are 0 .. num_token_types - 1.
        sentence_order: whether it also learns the order of the two segments of a sequence.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    activation: str = "gelu"
    num_token_types: int = 2  # pyright: ignore[reportIncompatibleVariableOverride]: of each model, none of a GPT
    sentence_order: bool = True

    def __post_init__(self) -> None:
        """Raises ConfigError if the sizes and choices do not fit together."""
        super().__post_init__()
        if self.sentence_order and self.num_token_types < 2:
            raise ConfigError(
                f"model.num_token_types={self.num_token_types} with model.sentence_order=True",
                rule="token-types: each of the two segments of a sequence has a token type of its own",
                picture="tokens of the first are of type 0, of the second of type 1",
                repair="set model.num_token_types=2, or model.sentence_order=False",
            )

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of the model; its head has the transform, and pooler and order."""
        h = self.hidden
        order = ((h, h), (h, 2)) if self.sentence_order else ()
        head = {"head_matmuls": ((h, h),), "sequence_matmuls": order, "sentence_order": self.sentence_order}
        return replace(super().anatomy, causal=False, **head)

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """Number of valid "targets" and orders of a batch, int32: {"masked_lm"} and "sentence_order"."""
        words = {"masked_lm": num_valid(batch["targets"])}
        return words | {"sentence_order": num_valid(batch["sentence_order"])} if self.sentence_order else words

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and losses."""
        return BertHead(
            self.anatomy,
            activation=ACTIVATIONS[self.activation],
            norm_epsilon=self.norm_epsilon,
            tie_embeddings=self.tie_embeddings,
            tensor=tensor,
            rngs=rngs,
        )


BERT = Family(
    name="bert",
    fields={
        **LAYER_NORM_FIELDS,
        "vocab_size": 260,  # the bytes, and the four special tokens that masked sequences need besides
        "activation": "gelu",  # between the matmuls of the feed forward: "gelu_tanh", "gelu" (erf), "relu"
        "num_token_types": 2,  # the segments of a sequence have types of their own
        "sentence_order": True,  # it also learns in which order the two segments of a sequence stood
        **DROPOUTS,
        **CHOICES,
        **FIELDS,
    },
    words=LAYER_NORM_WORDS,
    build=lambda fields, seq_len: BertConfig(**with_lora(with_positions(fields, seq_len))),
    check=check_positions,
    masked=True,
    example="configs/bert_base.py",
)
