"""Tiny GPTs and LLaMAs whose heads, words, columns and positions two devices can share, and batches for them."""

import functools
from typing import Any

import jax
import numpy as np

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import GPTConfig, LanguageModel, LlamaConfig
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import Schedule

MICROBATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 2, 8, 32
_SIZES = {"hidden": 16, "num_heads": 4, "vocab_size": VOCAB_SIZE}


def config_of(family: str, *, num_layers: int, dropout: float = 0.0, **choices: Any) -> GPTConfig | LlamaConfig:
    """The config of a family; a GPT drops everywhere, at three rates that differ."""
    if family == "llama":
        assert not dropout
        return LlamaConfig(num_layers=num_layers, **_SIZES, num_kv_heads=2, feed_forward=24, **choices)
    return GPTConfig(
        num_layers=num_layers,
        **_SIZES,
        seq_len=SEQ_LEN,
        embedding_dropout=dropout / 2,
        attention_dropout=dropout,
        hidden_dropout=dropout / 3,
        **choices,
    )


@functools.cache
def random_params(config: GPTConfig | LlamaConfig) -> Any:
    """Random numbers everywhere: initial biases are 0 and norms 1, where a mistake in them would hide."""
    generator = np.random.default_rng(0)

    def fill(path, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return generator.normal(mean, 0.2, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(LanguageModel(config).init, jax.random.key(0)))


def random_batch(num_microbatches: int, *, seed: int) -> dict[str, np.ndarray]:
    """Tokens, and the next ones as targets, of which a fifth is not valid."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(VOCAB_SIZE, size=(num_microbatches, MICROBATCH_SIZE, SEQ_LEN + 1), dtype=np.int32)
    targets = np.where(generator.random(tokens.shape) < 0.2, -1, tokens)[..., 1:]
    return {"tokens": tokens[..., :-1], "targets": targets}


def pipeline_of(
    schedule: Schedule,
    config: GPTConfig | LlamaConfig,
    *,
    data: int = 1,
    tensor: int = 1,
    devices: Any = None,
    deterministic: bool = False,
    **options: Any,
) -> Pipeline:
    """The model of `config` on a data x pipe x tensor mesh."""
    model = LanguageModel(config, TensorAxis(tensor, deterministic))
    return Pipeline(
        schedule,
        make_mesh(data=data, pipe=schedule.num_devices, tensor=tensor, devices=devices),
        StageFunctions.of(model),
        num_layers=config.num_layers,
        deterministic=deterministic,
        **options,
    )
