"""Compiles the training step of a config from shapes alone: no parameter and no token is made."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

from jaxpipe.estimate.costs import Decided, decide_costs
from jaxpipe.program import Pipeline
from jaxpipe.training.batches import example_batch
from jaxpipe.training.given import BatchSource, Model, given_task
from jaxpipe.training.run_step import Step
from jaxpipe.training.setup import dropout_seed, optimizer_and_step, pipeline_of, topology_of
from jaxpipe.training.step import TrainState, state_like
from jaxpipe.training.task import language_model


@dataclass(frozen=True)
class CompiledStep:
    """One compiled training step.

    Attributes:
        compiled: the step, compiled.
        state: shapes and shardings of the train state.
        batch: shapes of the batch, leaves [num_microbatches, microbatch size, ...].
        has_dropout: whether the step uses dropout.
        compile_s: seconds for tracing, lowering and compiling.
        costs: expected costs for which its schedule was made.
    """

    compiled: Step
    state: TrainState
    batch: dict[str, jax.ShapeDtypeStruct]
    has_dropout: bool
    compile_s: float
    costs: Decided

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the step: of one batch with a flush."""
        return self.compiled.pipeline


def compile_step(
    config: ConfigDict,
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
        config: the checked config.
        devices: data x pipe x tensor devices, which need not be present.
        gpus_per_node: GPUs per node; None asks the devices.
        whole_batch: whether every device has the whole batch and takes its part of it, so that it can count the terms
            of all losses alone.
        model, params, train_batches: a model given in Python, as to `jaxpipe.training.fit`; of `params` and of a batch
            the shapes are read.

    Raises:
        ConfigError: `model.attention` cannot be compiled for these devices, or `mesh.order` is not possible on them.
    """
    # What is decided is written into the config, and the caller's stays as it was.
    config = copy.deepcopy(config)
    task = None
    if model:
        task = given_task(config, model=model, params=params, train_batches=train_batches, heldout_batches=())
    costs = decide_costs(config, topology_of(devices, gpus_per_node=gpus_per_node), task and task.given)
    costs.settle(config)
    trained = task.model if task else language_model(config)
    pipeline = pipeline_of(config, trained, devices, gpus_per_node=gpus_per_node)
    optimizer, step = optimizer_and_step(config, trained, pipeline)
    # Counting terms of a split batch needs a sum over devices, and a mocked step may have no collectives but local
    # ones.
    batch_sharding = NamedSharding(pipeline.mesh, P()) if whole_batch else pipeline.batch_sharding
    state = state_like(trained, pipeline, optimizer, step.init)
    batch = _batch_like(task.train_batches.at(0) if task else example_batch(config), batch_sharding)
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - start
    has_dropout = dropout_seed(config, trained) is not None
    # Between two calls, as a run holds it: without flush some arrays are in flight.
    return CompiledStep(compiled, step.between_calls(state), batch, has_dropout, compile_s, costs)


def _batch_like(batch: Any, sharding: NamedSharding) -> dict[str, jax.ShapeDtypeStruct]:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), batch)
