"""The two steps of the benchmark, pipelined and unpipelined, of one config. The tokens' values do not matter."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from ml_collections import ConfigDict

from jaxpipe.mesh import Randomness
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.training.batches import example_batch
from jaxpipe.training.setup import build_pipeline, dropout_seed
from jaxpipe.training.step import mean_factors

PyTree = Any


@dataclass(frozen=True)
class StepPair:
    """One pipelined and one unpipelined step on the same numbers, ready to compile.

    Attributes:
        config: the checked config.
        pipeline: makes the pipelined step.
        model: the model as one device computes it.
        params: staged float32 masters, on the mesh.
        batch: the batch on the mesh.
        canonical: parameters in compute dtype, on this process's first device.
        local_batch: the batch on that device.
        scale: factors that turn sums of losses into means.
        dropout_seed: the trainer's seed; None if the model has no dropout.
    """

    config: ConfigDict
    model: LanguageModel
    pipeline: Pipeline
    params: PyTree
    batch: PyTree
    canonical: PyTree
    local_batch: PyTree
    scale: PyTree
    dropout_seed: int | None

    @property
    def key(self) -> jax.Array | None:
        """The random key of the measured step."""
        return None if self.dropout_seed is None else jax.random.key(self.dropout_seed)

    def compile_pipelined(self) -> Any:
        """A compiled function () -> (loss, staged gradients)."""
        arguments = (self.params, self.batch, self.scale, self.key)
        return partial(self.pipeline.loss_and_grads.lower(*arguments).compile(), *arguments)

    def compile_unpipelined(self) -> Any:
        """A compiled function () -> (loss, canonical gradients) on one device."""
        arguments = (self.canonical, self.local_batch, self.scale, self.key)
        step = jax.jit(partial(unpipelined_loss_and_grads, self.model))
        return partial(step.lower(*arguments).compile(), *arguments)


def make_step_pair(config: ConfigDict, devices: tuple[Any, ...]) -> StepPair:
    """The two steps of a checked config on `devices`."""
    split_model, pipeline = build_pipeline(config, devices)
    model = LanguageModel(split_model.config)
    local_batch = example_batch(config)

    def init() -> PyTree:
        return model.init(jax.random.key(0))

    def computed_with() -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(config.model.dtype), init())

    staged = jax.eval_shape(lambda: pipeline.to_stages(init()))
    return StepPair(
        config=config,
        model=model,
        pipeline=pipeline,
        params=jax.jit(lambda: pipeline.to_stages(init()), out_shardings=pipeline.shardings(staged))(),
        batch=jax.tree.map(
            lambda leaf: jax.make_array_from_callback(leaf.shape, pipeline.batch_sharding, leaf.__getitem__),
            local_batch,
        ),
        canonical=jax.jit(computed_with)(),
        local_batch=local_batch,
        scale=jax.tree.map(np.float32, mean_factors(model.num_losses(local_batch))),
        dropout_seed=dropout_seed(config, model),
    )


def unpipelined_loss_and_grads(
    model: LanguageModel, params: PyTree, batch: PyTree, scale: PyTree, key: jax.Array | None = None
) -> tuple[PyTree, PyTree]:
    """Losses and float32 gradients of their sum by `jax.grad`, scanned over layers and microbatches.

    Args:
        model: the model as one device computes it.
        params: canonical parameters.
        batch: leaves [num_microbatches, microbatch size, ...].
        scale: a factor for each kind of loss.
        key: the step's random key; None means no dropout.
    """
    random = None if key is None else Randomness(jax.random.key_data(key), jnp.zeros((), jnp.int32))

    def losses_of(params: PyTree, microbatch: PyTree, index: jax.Array) -> tuple[jax.Array, PyTree]:
        losses = jax.tree.map(jnp.multiply, scale, model.loss_sum(params, microbatch, random, index))
        return jax.tree.reduce(jnp.add, losses), losses

    def microbatch(sums: tuple[PyTree, PyTree], numbered: tuple[jax.Array, PyTree]) -> tuple[tuple, None]:
        index, microbatch = numbered
        grads, losses = jax.grad(losses_of, has_aux=True)(params, microbatch, index)
        return jax.tree.map(lambda total, term: total + term.astype(total.dtype), sums, (losses, grads)), None

    zeros = (
        jax.tree.map(jnp.zeros_like, scale),
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params),
    )
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    return lax.scan(microbatch, zeros, (jnp.arange(num_microbatches), batch))[0]
