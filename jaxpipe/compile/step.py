"""The training step of a config, and its compilation from shapes alone: no parameter and no token is made."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.config.base import RunConfig
from jaxpipe.config.run_spec import RunSpec
from jaxpipe.estimate import resolve
from jaxpipe.program import Pipeline
from jaxpipe.training.batches import example_batch, put_batch
from jaxpipe.training.given import Model, given_task
from jaxpipe.training.given_batches import BatchSource
from jaxpipe.training.run_step import Step
from jaxpipe.training.setup import dropout_seed, optimizer_and_step, pipeline_of, topology_of
from jaxpipe.training.step import TrainState, init_state, state_like
from jaxpipe.training.task import Trained, language_model


@dataclass(frozen=True)
class TrainingStep:
    """One training step before it is traced; `step.lower(state, batch).compile()` takes shapes or arrays.

    Attributes:
        state: shapes and shardings of the train state.
        batch: shapes of the batch, leaves [num_microbatches, microbatch size, ...].
        has_dropout: whether the step draws random numbers.
        spec: what the run does that it is a step of.
        rows: a batch on this host.
    """

    step: Step
    model: Trained
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    has_dropout: bool
    spec: RunSpec
    rows: dict[str, Any]

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the step: of one batch with a flush."""
        return self.step.pipeline

    def init(self, *, seed: int = 0) -> TrainState:
        """The state before the first step, on the devices, which must be present."""
        return self.step.init(init_state(self.model, self.pipeline, self.optimizer, seed=seed))

    def example(self) -> dict[str, jax.Array]:
        """A batch of random tokens on the devices, or the first one of a model given in Python."""
        return put_batch(self.pipeline, self.rows)


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


def training_step(
    config: RunConfig,
    devices: Sequence[Any],
    *,
    gpus_per_node: int | None = None,
    whole_batch: bool = False,
    model: Model | None = None,
    params: Any = None,
    train_batches: BatchSource | None = None,
) -> TrainingStep:
    """The training step that `jaxpipe.train` would run, before it is traced.

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
    rows = task.train_batches.at(0) if task else example_batch(config)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=batch_sharding), rows)
    state = state_like(trained, pipeline, optimizer, step.init)
    has_dropout = dropout_seed(config, trained) is not None
    return TrainingStep(step, trained, optimizer, state, batch, has_dropout, spec, rows)


def compile_step(config: RunConfig, devices: Sequence[Any], **options: Any) -> CompiledStep:
    """The training step that `jaxpipe.train` would run, compiled; arguments and errors are those of `training_step`."""
    of = training_step(config, devices, **options)
    start = time.perf_counter()
    compiled = of.step.lower(of.state, of.batch).compile()
    compile_s = time.perf_counter() - start
    # Between two calls, as a run holds it: without flush some arrays are in flight.
    return CompiledStep(compiled, of.step.between_calls(of.state), of.batch, of.has_dropout, compile_s, of.spec)
