"""GPT: what `embed`, `layer` and `head` compute, and its initial parameters in canonical layer order.

Parameters are plain nested dicts: `{"shared": ..., "layers": ...}`, every leaf of `layers` with a leading
dim of `num_layers`. Their numbers depend on the key alone, never on a mesh or a schedule. The functions
compute in the dtype of the parameters they are given; cast the parameters to choose it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from flax import nnx

from jaxpipe.errors import ConfigError, closest
from jaxpipe.models.attention import ATTENTION
from jaxpipe.models.block import Block
from jaxpipe.models.ends import Embedding, Head, token_loss_sum

RECOMPUTE = ("none", "attention", "full")

Params = dict[str, Any]


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a GPT.

    Attributes:
        num_layers: transformer layers, >= 1.
        hidden: size of the residual stream; `num_heads` divides it.
        num_heads: attention heads.
        vocab_size: tokens are 0 .. vocab_size - 1.
        seq_len: learned positions; the longest sequence.
        tie_embeddings: whether the logits use the token table in place of a kernel of their own.
        attention: a key of `jaxpipe.models.attention.ATTENTION`.
        recompute: what backward computes again in place of saving it: nothing; the attention scores and
            probabilities; or the whole layer.
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocab_size: int
    seq_len: int
    tie_embeddings: bool = True
    attention: str = "xla"
    recompute: str = "none"

    def __post_init__(self) -> None:
        """Raises ConfigError where the sizes and choices do not fit together."""
        if self.hidden % self.num_heads:
            lower = self.hidden - self.hidden % self.num_heads
            nearest = lower or self.num_heads
            raise ConfigError(
                f"model.hidden={self.hidden} does not divide into model.num_heads={self.num_heads} heads\n"
                "  rule hidden-per-head: hidden is a multiple of num_heads\n"
                f"      {self.hidden} = {self.num_heads} x {self.hidden // self.num_heads}"
                f" + {self.hidden % self.num_heads}\n"
                f"  repair: set model.hidden={nearest} (the nearest below) or {lower + self.num_heads}"
            )
        for field, known in (("attention", tuple(ATTENTION)), ("recompute", RECOMPUTE)):
            value = getattr(self, field)
            if value not in known:
                raise ConfigError(
                    f"model.{field}={value!r} is not known.{closest(value, list(known))}\n"
                    f"  rule model-{field}: one of {', '.join(known)}\n"
                    f"  repair: set model.{field}={known[0]!r}"
                )


@dataclass(frozen=True)
class GPT:
    """The pure functions of a GPT.

    Example:
        >>> import jax
        >>> model = GPT(GPTConfig(num_layers=2, hidden=8, num_heads=2, vocab_size=256, seq_len=4))
        >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
        >>> shapes["layers"]["up"]["kernel"].shape
        (2, 8, 32)
    """

    config: GPTConfig

    def init(self, key: jax.Array) -> Params:
        """Initial parameters, float32: `{"shared": ..., "layers": ...}` with layers in canonical order."""
        ends_key, layers_key = jax.random.split(key)
        rngs = nnx.Rngs(params=ends_key)
        return {
            "shared": {"embedding": _params(self._new_embedding(rngs)), "head": _params(self._new_head(rngs))},
            "layers": jax.vmap(lambda layer_key: _params(self._new_block(nnx.Rngs(params=layer_key))))(
                jax.random.split(layers_key, self.config.num_layers)
            ),
        }

    def embed(self, shared: Params, microbatch: dict[str, jax.Array]) -> jax.Array:
        """The residual stream "batch seq hidden" of `microbatch["tokens"]`."""
        return nnx.merge(self._graphs["embedding"], shared["embedding"])(microbatch["tokens"])

    def layer(self, layer: Params, x: jax.Array) -> jax.Array:
        """The residual stream "batch seq hidden" after one layer."""

        def apply(layer: Params, x: jax.Array) -> jax.Array:
            return nnx.merge(self._graphs["block"], layer)(x)

        # prevent_cse=False: a layer's forward and backward never stand in one loop body, so nothing can be merged.
        return (jax.checkpoint(apply, prevent_cse=False) if self.config.recompute == "full" else apply)(layer, x)

    def head(self, shared: Params, x: jax.Array, microbatch: dict[str, jax.Array]) -> jax.Array:
        """The sum of the losses of the valid `microbatch["targets"]`, float32, in nats."""
        token_table = shared["embedding"]["token"] if self.config.tie_embeddings else None
        logits = nnx.merge(self._graphs["head"], shared["head"])(x, token_table)
        return token_loss_sum(logits, microbatch["targets"])

    def loss_sum(self, params: Params, microbatch: dict[str, jax.Array]) -> jax.Array:
        """The sum of the losses of the valid tokens, the layers scanned: the model without a pipeline."""
        x = self.embed(params["shared"], microbatch)
        x, _ = jax.lax.scan(lambda x, layer: (self.layer(layer, x), None), x, params["layers"])
        return self.head(params["shared"], x, microbatch)

    @cached_property
    def _graphs(self) -> dict[str, Any]:
        new = {"embedding": self._new_embedding, "block": self._new_block, "head": self._new_head}
        return {name: nnx.graphdef(nnx.eval_shape(lambda make=make: make(nnx.Rngs(0)))) for name, make in new.items()}

    def _new_embedding(self, rngs: nnx.Rngs) -> Embedding:
        c = self.config
        return Embedding(vocab_size=c.vocab_size, seq_len=c.seq_len, hidden=c.hidden, rngs=rngs)

    def _new_block(self, rngs: nnx.Rngs) -> Block:
        c = self.config
        attention = ATTENTION[c.attention]
        if c.recompute == "attention":
            attention = jax.checkpoint(attention, prevent_cse=False)
        return Block(hidden=c.hidden, num_heads=c.num_heads, num_layers=c.num_layers, attention=attention, rngs=rngs)

    def _new_head(self, rngs: nnx.Rngs) -> Head:
        c = self.config
        return Head(vocab_size=c.vocab_size, hidden=c.hidden, tie_embeddings=c.tie_embeddings, rngs=rngs)


def _params(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
