"""Compiles the training step of a config from shapes alone: no parameter and no token is made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.config.base import RunConfig
from jaxpipe.config.run_spec import RunSpec
from jaxpipe.estimate import resolve
from jaxpipe.program import Pipeline
from jaxpipe.training.batches import example_batch
from jaxpipe.training.given import BatchSource, Model, given_task
from jaxpipe.training.run_step import Step
from jaxpipe.training.setup import dropout_seed, optimizer_and_step, pipeline_of, topology_of
from jaxpipe.training.step import TrainState, state_like
from jaxpipe.training.task import language_model


@dataclass(frozen=True)
class CompiledStep:
    """One compiled training step."""

    compiled: Step
    state: TrainState  # shapes and shardings of the train state
    batch: dict[str, jax.ShapeDtypeStruct]  # shapes of the batch, leaves [num_microbatches, microbatch size, ...]
    has_dropout: bool
    compile_s: float  # seconds for tracing, lowering and compiling
    spec: RunSpec  # what the run does that it is a step of

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the step: of one batch with a flush."""
        return self.compiled.pipeline


def compile_step(
    config: RunConfig,
    devices: Sequence[Any],
    *,
    gpus_per_node: int | None = None,
    whole_batch: bool = False,
    model: Model | None = None,
    params: Any = None,
    train_batches: BatchSource | None = None,
) -> CompiledStep:
    """The training step that `jaxpipe.train` would run.

    Args:
        devices: data x pipe x tensor devices, which need not be present.
        gpus_per_node: None asks the devices.
        whole_batch: whether every device has the whole batch and takes its part of it, so that it can count the terms
            of all losses alone.
        model, params, train_batches: a model given in Python, as to `jaxpipe.training.fit`; of `params` and of a batch
            the shapes are read.

    Raises:
        ConfigError: `model.attention` cannot be compiled for these devices, or `mesh.order` is not possible on them.
    """
    config = RunConfig.of(config)
    task = None
    if model:
        config, task = given_task(config, model=model, params=params, train_batches=train_batches, heldout_batches=())
    spec = resolve(config, topology_of(devices, gpus_per_node=gpus_per_node), given=task and task.given)
    config = spec.config
    trained = task.model if task else language_model(config)
    pipeline = pipeline_of(spec, trained, devices, gpus_per_node=gpus_per_node)
    optimizer, step = optimizer_and_step(spec, trained, pipeline)
    # Counting terms of a split batch needs a sum over devices, and a mocked step may have no collectives but local
    # ones.
    batch_sharding = NamedSharding(pipeline.mesh, P()) if whole_batch else pipeline.batch_sharding
    state = state_like(trained, pipeline, optimizer, step.init)
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=batch_sharding),
        task.train_batches.at(0) if task else example_batch(config),
    )
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - start
    has_dropout = dropout_seed(config, trained) is not None
    # Between two calls, as a run holds it: without flush some arrays are in flight.
    return CompiledStep(compiled, step.between_calls(state), batch, has_dropout, compile_s, spec)
