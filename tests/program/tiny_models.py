"""Tiny models of every family whose heads, words, columns and positions two devices can share; batches for them."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import (
    BertConfig,
    DeepseekConfig,
    GPTConfig,
    GptOssConfig,
    LanguageModel,
    LlamaConfig,
    MixtureConfig,
)
from jaxpipe.models.rotary import RotaryScaling
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.without_flush import Stream, one_batch
from jaxpipe.schedules import Schedule

MICROBATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 2, 8, 32
_SIZES = {"hidden": 16, "num_heads": 4}
_NUM_WORDS_OF_BERT, _MOST_PREDICTED = 27, 3  # its vocabulary has rows of no word

ModelConfig = BertConfig | GPTConfig | LlamaConfig


def config_of(family: str, *, num_layers: int, dropout: float = 0.0, **choices: Any) -> ModelConfig:
    """The config of a family; GPT and BERT drop everywhere, at three rates that differ."""
    if family == "gpt_oss":
        sizes = {**_SIZES, "vocab_size": VOCAB_SIZE, "num_kv_heads": 2, "feed_forward": 24, "head_size": 6}
        sizes |= {"num_experts": 5, "balance_loss": 0.7, "z_loss": 0.3, "swiglu_limit": 0.5}
        scaling = RotaryScaling("yarn", 4.0, original_max_position=4)
        windows = {"sliding_window": 3, "full_every": 2, "rope_scaling": scaling}
        return GptOssConfig(num_layers=num_layers, **{**sizes, **windows, **choices})
    if family.startswith("deepseek"):
        sizes = {**_SIZES, "vocab_size": VOCAB_SIZE, "num_kv_heads": 4, "feed_forward": 12, "dense_width": 20}
        sizes |= {"plain_size": 3, "rotary_size": 4, "value_size": 5, "latent_size": 7, "query_latent_size": 9}
        sizes |= {"num_experts": 8, "balance_loss": 0.7, "z_loss": 0.3, "bias_rate": 0.1, "weight_scale": 2.5}
        groups = {"num_groups": 4, "groups_per_token": 2, "experts_per_token": 3, "num_dense": 2}
        scaling = {"rope_scaling": RotaryScaling("yarn", 4.0, original_max_position=4), "score_mscale": 1.0}
        if family == "deepseek_v2":
            groups |= {"scores": "softmax", "query_latent_size": None, "num_dense": 1, "num_shared": 2}
            sizes |= {"bias_rate": 0.0, "normalize_weights": False}
        return DeepseekConfig(num_layers=num_layers, **{**sizes, **groups, **scaling, **choices})
    if family in ("llama", "qwen3", "mixtral", "qwen3_moe"):
        assert not dropout
        sizes = {**_SIZES, "vocab_size": VOCAB_SIZE, "num_kv_heads": 2, "feed_forward": 24}
        if "qwen3" in family:
            sizes |= {"head_size": 6, "query_key_norm": True}
        if family in ("llama", "qwen3"):
            return LlamaConfig(num_layers=num_layers, **sizes, **choices)
        sizes |= {"num_experts": 5, "balance_loss": 0.7, "normalize_weights": family == "mixtral"}
        return MixtureConfig(num_layers=num_layers, **{**sizes, "z_loss": 0.3, **choices})
    make, words = GPTConfig, {"vocab_size": VOCAB_SIZE}
    if family == "bert":
        make, words = BertConfig, {"vocab_size": _NUM_WORDS_OF_BERT, "vocab_multiple": 8}
    return make(
        num_layers=num_layers,
        **_SIZES,
        **(words | choices),
        num_positions=SEQ_LEN,
        embedding_dropout=dropout / 2,
        attention_dropout=dropout,
        hidden_dropout=dropout / 3,
    )


@functools.cache
def random_params(config: ModelConfig) -> Any:
    """Random numbers everywhere: initial biases are 0 and norms 1, where a mistake in them would hide."""
    generator = np.random.default_rng(0)

    def fill(path, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return generator.normal(mean, 0.2, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(LanguageModel(config).init, jax.random.key(0)))


def random_batch(num_microbatches: int, *, seed: int, family: str = "gpt") -> dict[str, np.ndarray]:
    """Tokens, and the next ones as targets, of which a fifth is not valid; for a BERT `random_masked_batch`."""
    if family == "bert":
        return random_masked_batch(num_microbatches, seed=seed)
    generator = np.random.default_rng(seed)
    tokens = generator.integers(VOCAB_SIZE, size=(num_microbatches, MICROBATCH_SIZE, SEQ_LEN + 1), dtype=np.int32)
    targets = np.where(generator.random(tokens.shape) < 0.2, -1, tokens)[..., 1:]
    return {"tokens": tokens[..., :-1], "targets": targets}


def random_masked_batch(num_microbatches: int, *, seed: int) -> dict[str, np.ndarray]:
    """Two segments and padding, of all lengths; words to predict, some at one place; some orders count."""
    generator = np.random.default_rng(seed)
    shape = (num_microbatches, MICROBATCH_SIZE)
    num_tokens = generator.integers(2, SEQ_LEN + 1, (*shape, 1))
    place, num_first = np.arange(SEQ_LEN), generator.integers(1, num_tokens)
    predicted = generator.integers(0, num_tokens, (*shape, _MOST_PREDICTED))
    targets = generator.integers(_NUM_WORDS_OF_BERT, size=predicted.shape)
    batch = {
        "tokens": generator.integers(_NUM_WORDS_OF_BERT, size=(*shape, SEQ_LEN)),
        "token_types": (place >= num_first) & (place < num_tokens),
        "padding_mask": place < num_tokens,
        "predicted": predicted,
        "targets": np.where(generator.random(targets.shape) < 0.2, -1, targets),
        "sentence_order": generator.integers(-1, 2, shape),
    }
    return {name: values.astype(np.int32) for name, values in batch.items()}


def pipeline_of(
    schedule: Schedule,
    config: ModelConfig,
    *,
    data: int = 1,
    expert: int = 1,
    tensor: int = 1,
    context: int = 1,
    replicate: int = 1,
    devices: Any = None,
    deterministic: bool = False,
    num_layers: int | None = None,
    again: str = "none",
    **options: Any,
) -> Pipeline:
    """The model of `config`, or as many layers of it, on a mesh of these axes and `pipe`; of one batch.

    `again` may count layers of each stage that backward computes again, as in "full:2,1".
    """
    sizes = {"replicate": replicate, "data": data, "context": context, "expert": expert, "tensor": tensor}
    axis = TensorAxis.of(deterministic=deterministic, **sizes)
    model = LanguageModel(config, axis)
    kind, _, counts = again.partition(":")
    functions = replace(
        StageFunctions.of(model), layer_again=LanguageModel(replace(config, recompute=kind), axis).layer
    )
    return Pipeline(
        one_batch(schedule),
        make_mesh(pipe=schedule.num_devices, devices=devices, **sizes),
        functions,
        num_layers=num_layers or config.num_layers,
        deterministic=deterministic,
        recomputed=[int(count) for count in counts.split(",") if count],
        **options,
    )


def stream_of(schedule: Schedule, config: ModelConfig, **options: Any) -> Stream:
    """The same of a schedule without flush."""
    return Stream(schedule, pipeline_of(schedule, config, **options))


def summed(trees: Iterable[Any]) -> Any:
    """The sum of trees of arrays, leaf by leaf, in float64."""
    return jax.tree.map(lambda *leaves: sum(np.asarray(leaf, np.float64) for leaf in leaves), *trees)


def relative_errors(found: Any, expected: Any) -> dict[str, float]:
    """Norm of the difference over norm, for every parameter, of the layer where it is largest."""
    errors = {}
    for part, per_layer in (("shared", False), ("layers", True)):
        leaves = jax.tree_util.tree_leaves_with_path(found[part])
        for (path, leaf), wanted in zip(leaves, jax.tree.leaves(expected[part]), strict=True):
            assert leaf.shape == wanted.shape
            axes = tuple(range(per_layer, leaf.ndim))
            wanted = np.asarray(wanted, np.float64)
            difference = np.sqrt(np.square(np.asarray(leaf, np.float64) - wanted).sum(axes))
            errors[part + jax.tree_util.keystr(path)] = (difference / np.sqrt(np.square(wanted).sum(axes))).max()
    return errors
