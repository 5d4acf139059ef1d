"""A language model as the pure functions `init`, `embed`, `layer` and `head`, from a config of its family.

Parameters are plain nested dicts: `{"shared": ..., "layers": ...}`, every leaf of `layers` with a leading
dim of `num_layers`. Their numbers depend on the key alone, never on a mesh or a schedule. The functions
compute in the dtype of the parameters they are given; cast the parameters to choose it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpipe.mesh import Randomness, TensorAxis

Params = dict[str, Any]


class Family(Protocol):
    """What a model family's config offers: sizes, choices, and the modules that they make."""

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether the logits use the token table."""
        ...

    @property
    def recompute(self) -> str:
        """What backward computes again."""
        ...

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        ...

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """From (tokens, random) to the stream."""
        ...

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """From (stream, random) to the stream."""
        ...

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """From (stream, targets, token table or None) to the sum of the losses."""
        ...


@dataclass(frozen=True)
class LanguageModel:
    """The pure functions of a model.

    Attributes:
        config: a GPTConfig or LlamaConfig.
        tensor: the devices that share each layer; `init` makes whole parameters whatever it is.

    Example:
        >>> from jaxpipe.models import GPTConfig
        >>> model = LanguageModel(GPTConfig(num_layers=2, hidden=8, num_heads=2, vocab_size=256, seq_len=4))
        >>> shapes = jax.eval_shape(model.init, jax.random.key(0))
        >>> shapes["layers"]["feed_forward"]["up"]["kernel"].shape
        (2, 8, 32)
    """

    config: Family
    tensor: TensorAxis = field(default_factory=TensorAxis)

    def init(self, key: jax.Array) -> Params:
        """Initial parameters, float32: `{"shared": ..., "layers": ...}` with layers in canonical order."""
        ends_key, layers_key = jax.random.split(key)
        rngs = nnx.Rngs(params=ends_key)
        return {
            "shared": {name: _params(self._new(name, rngs)) for name in ("embedding", "head")},
            "layers": jax.vmap(lambda layer_key: _params(self._new("block", nnx.Rngs(params=layer_key))))(
                jax.random.split(layers_key, self.config.num_layers)
            ),
        }

    @cached_property
    def specs(self) -> Params:
        """The PartitionSpec over `tensor` of every shared parameter and of every parameter of one layer."""
        shared = {name: _specs(self._shapes(name)) for name in ("embedding", "head")}
        return {"shared": shared, "layers": _specs(self._shapes("block"))}

    def embed(self, shared: Params, microbatch: dict[str, jax.Array], random: Randomness | None) -> jax.Array:
        """The residual stream "batch local_seq hidden" of `microbatch["tokens"]`."""
        return self._module("embedding", shared["embedding"])(microbatch["tokens"], random)

    def layer(self, layer: Params, x: jax.Array, random: Randomness | None) -> jax.Array:
        """The residual stream "batch local_seq hidden" after one layer."""

        def apply(layer: Params, x: jax.Array, random: Randomness | None) -> jax.Array:
            return self._module("block", layer)(x, random)

        # prevent_cse=False: a layer's forward and backward never stand in one loop body, so nothing can be merged.
        full = self.config.recompute == "full"
        return (jax.checkpoint(apply, prevent_cse=False) if full else apply)(layer, x, random)

    def head(self, shared: Params, x: jax.Array, microbatch: dict[str, jax.Array]) -> jax.Array:
        """The sum of the losses of the valid `microbatch["targets"]`, float32, in nats."""
        token_table = shared["embedding"]["token"] if self.config.tie_embeddings else None
        return self._module("head", shared["head"])(x, microbatch["targets"], token_table)

    def loss_sum(
        self, params: Params, microbatch: dict[str, jax.Array], random: Randomness | None = None, index: Any = 0
    ) -> jax.Array:
        """The sum of the losses of the valid tokens, the layers scanned: the model without a pipeline.

        Args:
            params: `{"shared", "layers"}`.
            microbatch: "tokens" and "targets", each "batch seq".
            random: of the step, or None for no dropout.
            index: of the microbatch in its step.
        """

        def at(layer: Any) -> Randomness | None:
            return None if random is None else random.at(index, layer)

        def layer(walk: tuple[jax.Array, jax.Array], layer: Params) -> tuple[tuple[jax.Array, jax.Array], None]:
            x, i = walk
            return (self.layer(layer, x, at(i)), i + 1), None

        x = self.embed(params["shared"], microbatch, at(-1))
        (x, _), _ = jax.lax.scan(layer, (x, jnp.zeros((), jnp.int32)), params["layers"])
        return self.head(params["shared"], x, microbatch)

    def _new(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        return getattr(self.config, f"new_{name}")(self.tensor, rngs)

    def _shapes(self, name: str) -> nnx.Module:
        return nnx.eval_shape(lambda: self._new(name, nnx.Rngs(0)))

    @cached_property
    def _graphs(self) -> dict[str, Any]:
        return {name: nnx.graphdef(self._shapes(name)) for name in ("embedding", "block", "head")}

    def _module(self, name: str, params: Params) -> Any:
        return nnx.merge(self._graphs[name], params)


def _params(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _specs(module: nnx.Module) -> Params:
    """What each parameter says with `split`."""

    def spec(param: nnx.Param) -> P:
        split = param.get_metadata().get("split")
        return P() if split is None else P(*[None] * split, "tensor")

    return nnx.to_pure_dict(
        jax.tree.map(spec, nnx.state(module, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    )
