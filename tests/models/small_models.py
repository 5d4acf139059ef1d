"""A small model of each family whose sizes all differ, numbers for them, and how near gradients must be."""

import dataclasses
from collections.abc import Collection, Iterable
from itertools import cycle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.mesh import Randomness
from jaxpipe.models import BertConfig, GPTConfig, LanguageModel, LlamaConfig

BATCH, SEQ, HIDDEN, NUM_HEADS, NUM_KV_HEADS, VOCAB_SIZE, NUM_LAYERS = 3, 10, 24, 4, 2, 32, 2
DROPOUT = {"embedding_dropout": 0.2, "attention_dropout": 0.3, "hidden_dropout": 0.4}
KEY = jnp.array([3, 2**31 + 7], jnp.uint32)

_SIZES: dict[str, Any] = {"num_layers": NUM_LAYERS, "hidden": HIDDEN, "num_heads": NUM_HEADS, "vocab_size": VOCAB_SIZE}
CONFIGS = {
    "gpt": GPTConfig(**_SIZES, num_positions=12),
    "bert": BertConfig(**_SIZES, num_positions=12),
    "llama": LlamaConfig(**_SIZES, num_kv_heads=NUM_KV_HEADS, feed_forward=40, rope_theta=100.0, norm_epsilon=1e-2),
}


def in_tiers(cases: Iterable[Any], *, default: Collection[Any]) -> list[Any]:
    """`cases` of a parameter, or of several: those in `default`, and of the rest every third one in the second tier."""
    tiers = cycle((pytest.mark.ci, pytest.mark.slow, pytest.mark.slow))
    return [
        case if case in default else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=next(tiers))
        for case in cases
    ]


def config_of(family: str, **changes):
    return dataclasses.replace(CONFIGS[family], **changes)


def random_params(config, *, seed: int = 0):
    """Random numbers everywhere: initial biases are 0 and norms 1, where a mistake in them would hide."""
    generator = np.random.default_rng(seed)

    def fill(path, leaf):
        return generator.normal(float(path[-1].key == "scale"), 0.3, leaf.shape).astype(np.float32)

    return jax.tree_util.tree_map_with_path(fill, jax.eval_shape(LanguageModel(config).init, jax.random.key(0)))


def first_layer(params, dtype: str = "float32"):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[0], dtype), params["layers"])


def normal(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def stream(seed: int = 1) -> np.ndarray:
    return normal(BATCH, SEQ, HIDDEN, seed=seed)


def tokens_and_targets() -> dict[str, Any]:
    """A fifth of the targets, and all of the last sequence, are not valid."""
    generator = np.random.default_rng(2)
    tokens = generator.integers(VOCAB_SIZE, size=(BATCH, SEQ + 1), dtype=np.int32)
    targets = np.where(generator.random((BATCH, SEQ)) < 0.2, -1, tokens[:, 1:])
    targets[-1] = -1
    return {"tokens": tokens[:, :-1], "targets": targets}


def batch_of(family: str) -> dict[str, Any]:
    """What a model of the family is trained on."""
    return masked_tokens() if family == "bert" else tokens_and_targets()


def masked_tokens() -> dict[str, Any]:
    """Two of three sequences end in padding; places to predict that are left over are position 0 and not valid.

    One order is not valid, and no sequence has its segments alike.
    """
    generator = np.random.default_rng(5)
    length, second = np.array([[SEQ], [SEQ - 3], [4]]), np.array([[6], [2], [3]])
    position = np.arange(SEQ)
    return {
        "tokens": generator.integers(VOCAB_SIZE, size=(BATCH, SEQ), dtype=np.int32),
        "token_types": ((position >= second) & (position < length)).astype(np.int32),
        "padding_mask": (position < length).astype(np.int32),
        "predicted": np.array([[1, 5, 9, 2], [6, 2, 0, 0], [3, 0, 0, 0]], np.int32),
        "targets": np.array([[4, 0, 31, 7], [7, 30, -1, -1], [9, -1, -1, -1]], np.int32),
        "sentence_order": np.array([1, -1, 0], np.int32),
    }


def total(losses):
    """One number of the sums of a head: of BERT's two, each with a weight of its own."""
    if not isinstance(losses, dict):
        return losses
    return sum(
        weight * losses[name] for name, weight in (("masked_lm", 0.7), ("sentence_order", 1.9)) if name in losses
    )


def randomness(first_sequence: int = 0) -> Randomness:
    return Randomness(KEY, jnp.int32(first_sequence))


def assert_near(found, expected, *, tolerance: float = 1e-5) -> None:
    """Norm of the difference at most `tolerance` of the norm, leaf by leaf; where the norm is 0, equal.

    float32 rounds to 6e-8; sums of some hundred terms in another order, through a few layers, differ by a few
    1e-7 of their size.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True)
    for (path, leaf), wanted in pairs:
        leaf, wanted = np.asarray(leaf, np.float64), np.asarray(wanted, np.float64)
        assert leaf.shape == wanted.shape
        error, size = np.linalg.norm(leaf - wanted), np.linalg.norm(wanted)
        assert error <= tolerance * size, f"{jax.tree_util.keystr(path)}: {error} of {size}"
