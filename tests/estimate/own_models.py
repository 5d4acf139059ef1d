"""Models of one's own: a GRU, a Flax transformer, and layers of a large and a small function; batches for all."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe.config import base_config
from jaxpipe.layer_kinds import Pattern
from jaxpipe.training import Model
from jaxpipe.training.from_nnx import from_nnx

WORDS, HIDDEN, SEQ_LEN, NUM_LAYERS = 512, 256, 128, 8


def batches(step: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(step).integers(0, WORDS, (64, SEQ_LEN + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def embed(shared: Any, batch: Any, random: Any) -> jax.Array:
    return shared["table"][batch["tokens"]]


def head(shared: Any, x: jax.Array, batch: Any) -> jax.Array:
    words = jax.nn.log_softmax((x @ shared["table"].T).astype(jnp.float32))
    return -jnp.take_along_axis(words, batch["targets"][..., None], axis=-1).sum()


def model_of(layer: Any, **shapes: tuple[int, ...]) -> Model:
    """A model of layers with parameters of these shapes."""

    def init(key: jax.Array) -> Any:
        layers = {name: jnp.zeros((NUM_LAYERS, *shape)) for name, shape in shapes.items()}
        return {"shared": {"table": jax.random.normal(key, (WORDS, HIDDEN))}, "layers": layers}

    return Model(embed, layer, head, init=init, num_losses=lambda batch: batch["targets"].size)


def gru(params: Any, x: jax.Array, batch: Any, random: Any) -> jax.Array:
    """That of the notebook train_from_a_notebook, in kernels of its own for each gate."""

    def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        update = jax.nn.sigmoid(x @ params["update_x"] + h @ params["update_h"])
        reset = jax.nn.sigmoid(x @ params["reset_x"] + h @ params["reset_h"])
        new = jnp.tanh(x @ params["new_x"] + (reset * h) @ params["new_h"])
        h = (1 - update) * new + update * h
        return h, h

    return x + jax.lax.scan(cell, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[1].swapaxes(0, 1)


def large_and_small(params: Any, x: jax.Array, batch: Any, random: Any) -> jax.Array:
    """A feed forward eight times as wide, and a gate of one number a token."""
    large = jax.nn.gelu(x @ params["up"]) @ params["down"]
    return x + large * jax.nn.sigmoid(x @ params["gate"])


def feed_forward(params: Any, x: jax.Array, batch: Any, random: Any) -> jax.Array:
    return x + jax.nn.gelu(x @ params["up"]) @ params["down"]


def twice(params: Any, x: jax.Array, batch: Any, random: Any) -> jax.Array:
    return feed_forward(params, feed_forward(params, x, batch, random), batch, random)


def half_as_dear() -> Model:
    """A model whose later layers do all twice."""
    model = model_of(feed_forward, up=(HIDDEN, 4 * HIDDEN), down=(4 * HIDDEN, HIDDEN))
    return replace(model, other_layers=(twice,), pattern=Pattern(first=(0,) * (NUM_LAYERS // 2), unit=(1,)))


def every_second_again() -> Model:
    """A model whose every second layer saves its input alone."""
    model = model_of(feed_forward, up=(HIDDEN, 4 * HIDDEN), down=(4 * HIDDEN, HIDDEN))
    return replace(model, other_layers=(jax.checkpoint(feed_forward),), pattern=Pattern(unit=(0, 1)))


class Block(nnx.Module):
    """A transformer's layer of Flax's own parts."""

    def __init__(self, rngs: nnx.Rngs):
        self.norms = nnx.List([nnx.LayerNorm(HIDDEN, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, HIDDEN, decode=False, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        first, second = self.norms
        x = x + self.attention(first(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(jax.nn.gelu(self.up(second(x))))


def flax_transformer() -> dict[str, Any]:
    rngs = nnx.Rngs(0)

    def loss(head: nnx.Linear, x: jax.Array, batch: Any) -> jax.Array:
        words = jax.nn.log_softmax(head(x).astype(jnp.float32))
        return -(words * jax.nn.one_hot(batch["targets"], WORDS)).sum()

    made = from_nnx(
        nnx.Embed(WORDS, HIDDEN, rngs=rngs),
        [Block(rngs) for _ in range(NUM_LAYERS)],
        nnx.Linear(HIDDEN, WORDS, rngs=rngs),
        layer=lambda block, x, batch: block(x),
        loss=loss,
        num_losses=lambda batch: batch["targets"].size,
    )
    return {"model": made.model, "params": made.params}


def given(name: str) -> dict[str, Any]:
    """The arguments of `fit`, `plan` and `compile_step` for one of the models."""
    if name == "flax":
        return {**flax_transformer(), "train_batches": batches}
    square, gates = (HIDDEN, HIDDEN), ("update", "reset", "new")
    shapes = {f"{gate}_{of}": square for gate in gates for of in "xh"}
    wide = {"up": (HIDDEN, 8 * HIDDEN), "down": (8 * HIDDEN, HIDDEN), "gate": (HIDDEN, 1)}
    models = {"gru": lambda: model_of(gru, **shapes), "large": lambda: model_of(large_and_small, **wide)}
    return {"model": models[name](), "train_batches": batches}


# schedule, microbatches, data, pipe, recompute, dtype
SETTINGS = (
    ("1f1b", 8, 1, 4, "none", "float32"),
    ("gpipe", 4, 2, 2, "none", "bfloat16"),
    ("zb_v", 8, 1, 4, "none", "bfloat16"),
    ("1f1b", 8, 1, 4, "full", "bfloat16"),
    ("interleaved_1f1b", 8, 2, 2, "none", "float32"),
    ("zb_h1", 8, 2, 2, "full", "bfloat16"),
)


def config_of(schedule: str, num_microbatches: int, data: int, pipe: int, recompute: str, dtype: str) -> Any:
    config = base_config("given")
    config.pipeline.update(schedule=schedule, num_microbatches=num_microbatches)
    config.mesh.update(data=data, pipe=pipe)
    config.model.update(recompute=recompute, dtype=dtype)
    return config
