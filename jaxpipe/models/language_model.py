"""A language model as the pure functions `init`, `embed`, `layer`, `head` and `logits`, from a config of its family.

Parameters are plain nested dicts: `{"shared": ..., "layers": ...}`, every leaf of `layers` with a leading
dim of `num_layers`. Their values depend on the key alone, never on a mesh or a schedule. The functions
compute in the dtype of the given parameters; cast the parameters to choose it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.layer_kinds import Pattern
from jaxpipe.mesh import Randomness, TensorAxis, added, only_on_the_first, with_losses
from jaxpipe.models.attention import Cache
from jaxpipe.models.embedding_and_head import Microbatch
from jaxpipe.models.ends_over_pipe import EndsOverPipe
from jaxpipe.models.experts import CHOSEN
from jaxpipe.models.family import ModelConfig
from jaxpipe.models.flops import model_flops
from jaxpipe.models.kinds import kinds_of, of_all_kinds, of_kind, over_layers, pattern_of
from jaxpipe.models.lora import trained_of
from jaxpipe.models.model_head import ModelHead
from jaxpipe.models.multi_token import WORDS, check_further
from jaxpipe.models.parameters import Params, specs_of, values_of
from jaxpipe.models.sequence_parts import check_sequence_parts
from jaxpipe.models.token_loss import CROSS_ENTROPY, CrossEntropy, TokenLoss
from jaxpipe.models.token_values import TokenValues

# Arrays of a microbatch that layers read, int32 "batch seq", if there are any.
TOKEN_ARRAYS = ("padding_mask", "positions", "is_token")


@dataclass(frozen=True)
class LanguageModel:
    """The pure functions of a model.

    Attributes:
        config: config of a family, as GPTConfig.
        tensor: the devices that share each layer; `init` makes whole parameters in any case.
        loss: the loss of words.

    Example:
        >>> from jaxpipe.models import GPTConfig
        >>> model = LanguageModel(GPTConfig(num_layers=2, hidden=8, num_heads=2, vocab_size=256, num_positions=4))
        >>> jax.eval_shape(model.init, jax.random.key(0))["layers"]["feed_forward"]["up"]["kernel"].shape
        (2, 8, 32)
    """

    config: ModelConfig
    tensor: TensorAxis = field(default_factory=TensorAxis)
    loss: CrossEntropy | TokenLoss = CROSS_ENTROPY

    def init(self, key: jax.Array) -> Params:
        """Initial parameters, float32: `{"shared": ..., "layers": ...}` with layers in canonical order."""
        # A key of its own for each layer: a layer's values depend on no other parameter.
        ends_key, layers_key = jax.random.split(key)
        rngs = nnx.Rngs(params=ends_key)
        keys = jax.random.split(layers_key, self.config.num_layers)
        return {
            "shared": {name: values_of(self._new(name, rngs)) for name in ("embedding", "head")},
            "layers": of_all_kinds(self.config, keys, [model._new_layers for model in self.of_kinds]),
        }

    def _new_layers(self, keys: jax.Array) -> Params:
        """Initial parameters of layers of one kind, by their keys."""
        return jax.vmap(lambda key: values_of(self._new("block", nnx.Rngs(params=key))))(keys)

    @property
    def has_dropout(self) -> bool:
        """Whether anything is dropped in training."""
        return self.config.anatomy.has_dropout

    def flops(self, batch: dict[str, Any]) -> int:
        """FLOPs of forward and backward of a batch with leaves [num_microbatches, microbatch size, ...]."""
        *num_sequences, seq_len = batch["tokens"].shape
        num_predicted = batch["predicted"].shape[-1] if "predicted" in batch else None
        return math.prod(num_sequences) * model_flops(self.config, seq_len=seq_len, num_predicted=num_predicted)

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """Number of terms in each sum of `loss_sum` over a batch of any number of dims: its structure, int32."""
        return self.loss.num_losses(batch, self.config.num_losses(batch))

    @cached_property
    def specs(self) -> Params:
        """PartitionSpecs of the shared parameters, whose rows of tokens `pipe` may split too, and of a layer's."""
        axes = "tensor" if self.tensor.num_pipe == 1 else ("tensor", "pipe")
        shared = {name: specs_of(self._abstract(name), axes) for name in ("embedding", "head")}
        of_kinds = (model if self.pattern.only else self for model in self.of_kinds)
        layers = {name: of for model in of_kinds for name, of in specs_of(model._abstract("block")).items()}
        return {"shared": shared, "layers": layers}

    @cached_property
    def is_trained(self) -> Params | None:
        """Whether each parameter is trained, as `specs`; None: all are."""
        return trained_of(self.specs) if getattr(self.config, "lora", None) else None

    @property
    def pattern(self) -> Pattern:
        """The kind of each layer."""
        return pattern_of(self.config)

    @cached_property
    def of_kinds(self) -> tuple[LanguageModel, ...]:
        """[kind] a model whose layers are all of one kind."""
        return (self, *(replace(self, config=kind) for kind in kinds_of(self.config)[1:]))

    @property
    def other_layers(self) -> tuple[Callable[..., Any], ...]:
        """As `layer`, the functions of kinds 1, 2, ...: see `jaxpipe.program.StageFunctions`."""
        return tuple(model.layer for model in self.of_kinds[1:])

    def __post_init__(self) -> None:
        """Raises ConfigError if the model cannot be split as `tensor` says, or its head not end in `loss`."""
        check_sequence_parts(self.config, self.tensor)
        check_further(self.config, self.tensor, of_words=isinstance(self.loss, CrossEntropy))

    @cached_property
    def sharing(self) -> TensorAxis:
        """The devices that share each layer, which cut sequences as its queries see keys."""
        return replace(self.tensor, context=replace(self.tensor.context, causal=self.config.anatomy.causal))

    @property
    def training_losses(self) -> tuple[str, ...]:
        """The names of losses that evaluation leaves out."""
        return getattr(self.config, "further_losses", ())

    @property
    def num_sequence_parts(self) -> int:
        """Devices that split each sequence."""
        return self.tensor.context.size

    def embed(self, shared: Params, microbatch: Microbatch, random: Randomness | None) -> jax.Array:
        """Residual stream "batch local_seq hidden" of "tokens", and of "positions" and "token_types" if there are."""
        return self._module("embedding", shared["embedding"])(microbatch, random)

    def layer(self, layer: Params, x: jax.Array, microbatch: Microbatch, random: Randomness | None) -> Any:
        """Residual stream "batch local_seq hidden" after one layer, of kind 0; with experts also its losses, by name.

        Args:
            microbatch: the batch's arrays, of which those of TOKEN_ARRAYS are read, int32 "batch seq": "padding_mask"
                is 0 for padding, which no token sees; "positions" are those in documents that stand back to back, and a
                token sees its own document alone; "is_token" is 0 for padding that no expert gets.
        """

        def apply(layer: Params, x: jax.Array, token_arrays: Microbatch, random: Randomness | None) -> Any:
            return self._module("block", layer)(x, token_arrays, random)

        # prevent_cse=False: a layer's forward and backward are never in one loop body, so nothing can be merged.
        function = apply
        if self.config.recompute == "full":
            # A router that chose again might choose otherwise.
            kept = jax.checkpoint_policies.save_only_these_names(CHOSEN)
            function = jax.checkpoint(apply, prevent_cse=False, policy=kept)
        return function(layer, x, {name: microbatch[name] for name in TOKEN_ARRAYS if name in microbatch}, random)

    def head(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> Any:
        """Sum of the losses of the valid targets, float32, in nats; BERT: a dict of such sums."""
        return self.model_head.losses(shared, x, microbatch)

    def head_values(self, shared: Params, x: jax.Array, microbatch: Microbatch) -> TokenValues:
        """The values of the targets of whole rows."""
        return self.model_head.values(shared, x, microbatch)

    def embed_backward(
        self, shared: Params, microbatch: Microbatch, random: Randomness | None, dx: jax.Array, sums: Params
    ) -> Params:
        """Running sums of the shared parameters' gradients, with those of `embed` added; the token table's in place.

        Args:
            dx: the gradient of its result.
            sums: float32, like `shared`.
        """

        def with_rows(params: Params, rows: jax.Array) -> jax.Array:
            return self._module("embedding", params).with_rows(rows, microbatch, random)

        embedding = self._module("embedding", shared["embedding"])
        _, vjp = jax.vjp(with_rows, shared["embedding"], embedding.rows(microbatch))
        d_params, d_rows = vjp(dx)
        token = embedding.add_at_rows(sums["embedding"]["token"], microbatch, d_rows)
        if self.tensor.num_pipe > 1:  # all devices add to their rows; the rest is the same on all and counts once
            d_params = only_on_the_first(d_params, "pipe")
        return {**sums, "embedding": {**added(sums["embedding"], d_params), "token": token}}

    def head_backward(
        self, shared: Params, x: jax.Array, microbatch: Microbatch, scale: Any, sums: Params
    ) -> tuple[Any, jax.Array, Params]:
        """Result of `head`, and gradients of its losses times `scale`: that of `x`, and `sums` with the others added.

        Args:
            scale: float32, a factor for each loss.
            sums: float32 running sums, like `shared`; that of the logits' kernel is changed in place.
        """
        return self.model_head.backward(shared, x, microbatch, scale, sums)

    @property
    def model_head(self) -> ModelHead:
        """Its head by parts."""
        return ModelHead(self)

    @property
    def over_pipe(self) -> EndsOverPipe | None:
        """Embedding and head by parts, if their rows are split over `pipe`."""
        return None if self.tensor.num_pipe == 1 else EndsOverPipe(self)

    # ---- Without a pipeline

    def logits(self, params: Params, microbatch: Microbatch) -> Any:
        """Logits of every position: the model without a pipeline, on one device, without dropout.

        Returns:
            Float32 "batch seq vocab"; BERT: {"masked_lm": "batch seq vocab"} and "sentence_order": "batch 2".
        """
        x, _ = self._stream(params, microbatch, None, 0)
        return self._module("head", params["shared"]["head"]).logits(x, self.model_head.token_table(params["shared"]))

    def new_cache(self, params: Params, *, batch: int, size: int) -> Cache | None:
        """A cache of no tokens, for at most `size`; None if blocks have no `following`."""
        if not hasattr(self._abstract("block"), "following"):
            return None
        sizes = self.config.anatomy
        dtype = params["shared"]["embedding"]["token"].dtype
        num_heads, *of_heads = sizes.kept or (sizes.num_kv_heads, sizes.head_size, sizes.head_size)
        keys, values = ((self.config.num_layers, batch, num_heads, size, of_head) for of_head in of_heads)
        return Cache.empty(keys, values, dtype)

    def following_logits(
        self, params: Params, tokens: jax.Array, cache: Cache, num_new: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Logits after the last of `num_new` further tokens, and the cache with them: on one device, causal.

        Args:
            tokens: int32 "batch token", those after the tokens of the cache; the first `num_new` of each row count.
            num_new: int32, 1 or more.

        Returns:
            Float32 "batch vocab"; the cache, whose further entries are not read.
        """

        def layer(walk: tuple[jax.Array, Cache], layer: Params, kind: int | None) -> tuple[Any, None]:
            models = self.of_kinds if kind is None else self.of_kinds[kind : kind + 1]
            blocks = [model._module("block", layer).following for model in models]
            x, cache = of_kind(self.config, walk[1].layer, blocks, *walk)
            return (x, replace(cache, layer=cache.layer + 1)), None

        positions = jnp.broadcast_to(cache.num_tokens + jnp.arange(tokens.shape[1]), tokens.shape)
        # Positions are given, since these tokens do not begin at 0.
        x = self.embed(params["shared"], {"tokens": tokens, "positions": positions}, None)
        (x, cache), _ = over_layers(self.config, layer, (x, cache), params["layers"])
        # - 1: the last of the new tokens; those after it only fill the row up to a size that is compiled.
        last = jax.lax.dynamic_slice_in_dim(x, num_new - 1, 1, axis=1)
        logits = self._module("head", params["shared"]["head"]).logits(
            last, self.model_head.token_table(params["shared"])
        )
        # By the new tokens alone, so that the next call writes over the entries that only filled up.
        return logits[:, 0], replace(cache, num_tokens=cache.num_tokens + num_new, layer=jnp.zeros_like(cache.layer))

    def loss_sum(self, params: Params, microbatch: Microbatch, random: Randomness | None = None, index: Any = 0) -> Any:
        """Result of `head` after a scan over the layers, and the layers' losses: the model without a pipeline.

        Args:
            random: random state of the step, or None for no dropout.
        """
        x, losses = self._stream(params, microbatch, random, index)
        words = self.head(params["shared"], x, microbatch)
        if not losses:
            return words
        return {**(words if isinstance(words, dict) else {WORDS: words}), **losses}

    def _stream(
        self, params: Params, microbatch: Microbatch, random: Randomness | None, index: Any
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The residual stream after the last layer, and the sums of all layers' losses."""

        # No dropout without a random state, as in evaluation.
        def at(layer: Any) -> Randomness | None:
            return None if random is None else random.at(index, layer)

        def layer(
            walk: tuple[jax.Array, jax.Array], layer: Params, kind: int | None
        ) -> tuple[tuple[jax.Array, jax.Array], Any]:
            x, i = walk
            models = self.of_kinds if kind is None else self.of_kinds[kind : kind + 1]
            layers = [partial(model.layer, layer) for model in models]
            x, losses = with_losses(of_kind(self.config, i, layers, x, microbatch, at(i)))
            return (x, i + 1), losses

        x = self.embed(params["shared"], microbatch, at(-1))
        (x, _), losses = over_layers(self.config, layer, (x, jnp.zeros((), jnp.int32)), params["layers"])
        # A loss of a layer is a number, added up over layers; a measure of each expert stays apart for each layer.
        return x, jax.tree.map(lambda leaf: jnp.sum(leaf) if leaf.ndim == 1 else leaf, losses)

    def _new(self, name: str, rngs: nnx.Rngs) -> nnx.Module:
        return getattr(self.config, f"new_{name}")(self.sharing, rngs)

    def _abstract(self, name: str) -> nnx.Module:
        return nnx.eval_shape(lambda: self._new(name, nnx.Rngs(0)))

    # Cached, because a module is built anew for each, and every action of every trace merges one.
    @cached_property
    def _graphs(self) -> dict[str, Any]:
        return {name: nnx.graphdef(self._abstract(name)) for name in ("embedding", "block", "head")}

    def _module(self, name: str, params: Params) -> Any:
        return nnx.merge(self._graphs[name], params)
