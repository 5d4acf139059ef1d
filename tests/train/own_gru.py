"""A model that is none of jaxpipe's: a stack of GRUs that reads words in ascending order, with dropout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxpipe.config import base_config
from jaxpipe.models.dropout import dropout
from jaxpipe.training import Model

WORDS, WIDTH, NUM_LAYERS, BATCH_SIZE = 32, 8, 7, 8


def embed(shared, batch, random):
    return dropout(shared["table"][batch["tokens"]], random, rate=0.1)


def layer(params, x, batch, random):
    def cell(h, x):
        update, reset = jnp.split(jax.nn.sigmoid(x @ params["gates_x"] + h @ params["gates_h"]), 2, axis=-1)
        h = update * h + (1 - update) * jnp.tanh(x @ params["new_x"] + (reset * h) @ params["new_h"])
        return h, h

    _, y = jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
    return x + dropout(y.swapaxes(0, 1), random, rate=0.1)


def head(shared, x, batch):
    words = jax.nn.log_softmax(x @ shared["out"])
    return -jnp.take_along_axis(words, batch["targets"][..., None], axis=-1).sum()


def init(key):
    shapes = {
        "shared": {"table": (WORDS, WIDTH), "out": (WIDTH, WORDS)},
        "layers": {
            "gates_x": (NUM_LAYERS, WIDTH, 2 * WIDTH),
            "gates_h": (NUM_LAYERS, WIDTH, 2 * WIDTH),
            "new_x": (NUM_LAYERS, WIDTH, WIDTH),
            "new_h": (NUM_LAYERS, WIDTH, WIDTH),
        },
    }
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda shape: isinstance(shape, tuple))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [0.3 * jax.random.normal(key, shape) for key, shape in zip(keys, leaves, strict=True)]
    )


def batches(step: int) -> dict[str, np.ndarray]:
    words = np.sort(np.random.default_rng(step).integers(0, WORDS, (BATCH_SIZE, 7)), axis=1)
    return {"tokens": words[:, :-1], "targets": words[:, 1:]}


def optimizer() -> optax.GradientTransformation:
    """Two groups of parameters: those of the layers learn faster, and decay."""

    def groups(params: Any) -> Any:
        return {name: jax.tree.map(lambda _, name=name: name, part) for name, part in params.items()}

    return optax.multi_transform({"shared": optax.adam(3e-3), "layers": optax.adamw(1e-2)}, groups)


MODEL = Model(embed, layer, head, init, num_losses=lambda batch: batch["targets"].size)


def config(schedule: str = "1f1b", *, data: int = 1, pipe: int = 2) -> ConfigDict:
    """Of a short run."""
    config = base_config("given")
    config.mesh.update(data=data, pipe=pipe, platform="cpu")
    config.pipeline.update(schedule=schedule, num_microbatches=4)
    config.train.update(steps=8, eval_every=4)
    config.checkpoint.save_every = 3
    return config
