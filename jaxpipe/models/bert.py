"""BERT as Megatron-LM trains it: GPT's layers, norms before them, seeing both ways; masked words and sentence order.

Source: Devlin et al., BERT, NAACL 2019; Shoeybi et al., Megatron-LM, 2019, section 5.3, for where the norms stand;
Lan et al., ALBERT, ICLR 2020, section 3.1, for the sentence order in place of the next sentence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.activations import ACTIVATIONS
from jaxpipe.models.bert_head import BertHead
from jaxpipe.models.choices import num_valid
from jaxpipe.models.layer_norm_sizes import LayerNormSizes


@dataclass(frozen=True)
class BertConfig(LayerNormSizes):
    """Sizes and choices of a BERT: those of `LayerNormSizes`, explained there, and two of its own.

    Attributes:
        num_token_types: "token_types" are 0 .. num_token_types - 1.
        sentence_order: whether it also learns in which order the two segments of a sequence stood.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    activation: str = "gelu"
    num_token_types: int = 2
    sentence_order: bool = True

    def __post_init__(self) -> None:
        """Checks."""
        super().__post_init__()
        if self.sentence_order and self.num_token_types < 2:
            raise ConfigError(
                f"model.num_token_types={self.num_token_types} with model.sentence_order=True\n"
                "  rule token-types: each of the two segments of a sequence has a token type of its own\n"
                "      tokens of the first are of type 0, of the second of type 1\n"
                "  repair: set model.num_token_types=2, or model.sentence_order=False"
            )

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """{"masked_lm"} and "sentence_order": how many of the batch's "targets" and orders are valid, int32."""
        words = {"masked_lm": num_valid(batch["targets"])}
        return words | {"sentence_order": num_valid(batch["sentence_order"])} if self.sentence_order else words

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Token, position and token type tables."""
        return self._embedding(tensor, rngs, num_token_types=self.num_token_types)

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer, of attention in both directions."""
        return self._block(tensor, rngs, causal=False)

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and losses."""
        return BertHead(
            vocab_size=self.vocab_size,
            num_rows=self.num_rows,
            hidden=self.hidden,
            activation=ACTIVATIONS[self.activation],
            norm_epsilon=self.norm_epsilon,
            sentence_order=self.sentence_order,
            tie_embeddings=self.tie_embeddings,
            tensor=tensor,
            rngs=rngs,
        )
