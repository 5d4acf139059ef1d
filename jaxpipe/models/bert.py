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
from jaxpipe.models.choices import check_activation, check_choices, check_heads, num_valid, rows_of_words
from jaxpipe.models.ends import Embedding
from jaxpipe.models.layer_norm_block import layer_norm_block


@dataclass(frozen=True)
class BertConfig:
    """Sizes and choices of a BERT.

    Attributes:
        num_token_types: "token_types" are 0 .. num_token_types - 1.
        sentence_order: whether it also learns in which order the two segments of a sequence stood.
        others: as in `GPTConfig`.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocab_size: int
    num_positions: int
    feed_forward: int | None = None
    activation: str = "gelu"
    norm_epsilon: float = 1e-5
    vocab_multiple: int = 1
    num_token_types: int = 2
    sentence_order: bool = True
    tie_embeddings: bool = True
    attention: str = "xla"
    recompute: str = "none"
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0

    def __post_init__(self) -> None:
        """Checks."""
        check_heads(hidden=self.hidden, num_heads=self.num_heads)
        check_activation(self.activation)
        check_choices(attention=self.attention, recompute=self.recompute)
        if self.sentence_order and self.num_token_types < 2:
            raise ConfigError(
                f"model.num_token_types={self.num_token_types} with model.sentence_order=True\n"
                "  rule token-types: each of the two segments of a sequence has a token type of its own\n"
                "      tokens of the first are of type 0, of the second of type 1\n"
                "  repair: set model.num_token_types=2, or model.sentence_order=False"
            )

    @property
    def num_rows(self) -> int:
        """Rows of the tables of words."""
        return rows_of_words(self.vocab_size, self.vocab_multiple)

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return max(self.embedding_dropout, self.attention_dropout, self.hidden_dropout) > 0

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """{"masked_lm"} and "sentence_order": how many of the batch's "targets" and orders are valid, int32."""
        words = {"masked_lm": num_valid(batch["targets"])}
        return words | {"sentence_order": num_valid(batch["sentence_order"])} if self.sentence_order else words

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Token, position and token type tables."""
        return Embedding(
            vocab_size=self.vocab_size,
            num_rows=self.num_rows,
            num_positions=self.num_positions,
            num_token_types=self.num_token_types,
            hidden=self.hidden,
            dropout_rate=self.embedding_dropout,
            tensor=tensor,
            rngs=rngs,
        )

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer, of attention in both directions."""
        return layer_norm_block(self, causal=False, tensor=tensor, rngs=rngs)

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
