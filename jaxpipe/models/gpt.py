"""GPT: learned positions, layer norms, biases, GELU, dropout; source: Brown et al. 2020 (GPT-3), Megatron-LM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flax import nnx

from jaxpipe.mesh import TensorAxis
from jaxpipe.models.choices import num_valid
from jaxpipe.models.ends import Head
from jaxpipe.models.layer_norm_sizes import LayerNormSizes
from jaxpipe.models.norms import LayerNorm


@dataclass(frozen=True)
class GPTConfig(LayerNormSizes):
    """Sizes and choices of a GPT: those of `LayerNormSizes`, each explained there.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """How many of the batch's "targets" are valid, int32."""
        return num_valid(batch["targets"])

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Token and position tables."""
        return self._embedding(tensor, rngs)

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer, of causal attention."""
        return self._block(tensor, rngs, causal=True)

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Final norm and loss."""
        return Head(
            LayerNorm(self.hidden, epsilon=self.norm_epsilon),
            vocab_size=self.vocab_size,
            num_rows=self.num_rows,
            hidden=self.hidden,
            tie_embeddings=self.tie_embeddings,
            tensor=tensor,
            rngs=rngs,
        )
