"""Train states of a tiny GPT with known numbers everywhere, staged by hand for any mesh and schedule."""

from typing import Any

import jax
import numpy as np
import optax

from jaxpipe.config.optimizers import is_kernel
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.staged_params import StagedLayout
from jaxpipe.schedules import build
from jaxpipe.training.step import TrainState, state_like

NUM_LAYERS = 9  # more than stages, and no multiple of them: some stages have rows that they do not use
ADAMW = optax.adamw(1e-2, mask=is_kernel)
SIZES: dict[str, Any] = {"num_layers": NUM_LAYERS, "hidden": 16, "num_heads": 4, "num_positions": 8}
CONFIG = GPTConfig(vocab_size=32, **SIZES)
MODEL = LanguageModel(CONFIG)
# Every kind of placement, and every axis by which arrays are split.
FORMS: dict[str, dict[str, Any]] = {
    "1f1b": {"pipe": 8},
    "bitpipe, tensor": {"schedule": "bitpipe", "pipe": 4, "tensor": 2},
    "one device": {"schedule": "gpipe", "pipe": 1},
    "bpipe, data": {"schedule": "bpipe", "pipe": 4, "data": 2},
    "interleaved, all axes": {"schedule": "interleaved_1f1b", "pipe": 2, "data": 2, "tensor": 2, "num_chunks": 2},
    "whole masters": {"schedule": "chimera", "pipe": 4, "data": 2, "shard": "none"},
    "parts of weights": {"schedule": "dualpipe", "pipe": 2, "data": 4, "shard": "weights"},
}


def make_pipeline(
    *,
    schedule: str = "1f1b",
    pipe: int,
    data: int = 1,
    tensor: int = 1,
    shard: str = "optimizer",
    config: GPTConfig = CONFIG,
    **options: Any,
) -> Pipeline:
    """On the first devices that there are."""
    return Pipeline(
        build(schedule, num_devices=pipe, num_microbatches=8, **options),
        make_mesh(data=data, pipe=pipe, tensor=tensor),
        StageFunctions.of(LanguageModel(config, TensorAxis(tensor))),
        num_layers=config.num_layers,
        shard=shard,
    )


def like_of(pipeline: Pipeline, optimizer: optax.GradientTransformation = ADAMW) -> TrainState:
    return state_like(MODEL, pipeline, optimizer)


def numbers(seed: int = 0) -> dict[str, np.ndarray]:
    """Canonical arrays of a state, others for each seed, by the names that they have in a checkpoint."""
    generator = np.random.default_rng(seed)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    arrays = {
        f"{tree}.{jax.tree_util.keystr(path, simple=True, separator='.')}": generator.normal(size=leaf.shape)
        for tree in ("params", "optimizer.0.mu", "optimizer.0.nu")
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
    }
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def names_of(tree: Any) -> set[str]:
    """The paths of its leaves, as a checkpoint names them."""
    return {
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    }


def staged(arrays: dict[str, np.ndarray], pipeline: Pipeline, *, count: int) -> TrainState:
    """The state of canonical `arrays`, each layer put by hand where the layout says; all counters are `count`."""

    def leaf(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        array = arrays.get(name, np.asarray(count, like.dtype))
        if ".layers." in name:
            array = on_stages(array, pipeline.layout)
        return jax.make_array_from_callback(like.shape, like.sharding, lambda index: array[index])

    return jax.tree_util.tree_map_with_path(leaf, like_of(pipeline))


def on_stages(array: np.ndarray, layout: StagedLayout) -> np.ndarray:
    result = np.zeros((*layout.canonical.shape, *array.shape[1:]), array.dtype)
    for place in np.ndindex(layout.canonical.shape):
        if layout.canonical[place] >= 0:
            result[place] = array[layout.canonical[place]]
    return result


def assert_equal(found: Any, expected: Any) -> None:
    """The same numbers on the same devices."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, leaf), wanted in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), path
        assert leaf.dtype == wanted.dtype
        for shard, other in zip(leaf.addressable_shards, wanted.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(other.data), err_msg=str(path))
