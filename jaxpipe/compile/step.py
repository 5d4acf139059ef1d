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
from jaxpipe.training.run_step import Step
from jaxpipe.training.setup import build_pipeline, dropout_seed, optimizer_and_step, topology_of
from jaxpipe.training.step import TrainState, state_like


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
    config: RunConfig, devices: Sequence[Any], *, gpus_per_node: int | None = None, whole_batch: bool = False
) -> CompiledStep:
    """The training step that `jaxpipe.train` would run.

    Args:
        devices: data x pipe x tensor devices, which need not be present.
        gpus_per_node: None asks the devices.
        whole_batch: whether every device has the whole batch and takes its part of it, so that it can count the terms
            of all losses alone.

    Raises:
        ConfigError: `model.attention` cannot be compiled for these devices, or `mesh.order` is not possible on them.
    """
    spec = resolve(config, topology_of(devices, gpus_per_node=gpus_per_node))
    config = spec.config
    model, pipeline = build_pipeline(spec, devices, gpus_per_node=gpus_per_node)
    optimizer, step = optimizer_and_step(spec, model, pipeline)
    # Counting terms of a split batch needs a sum over devices, and a mocked step may have no collectives but local
    # ones.
    batch_sharding = NamedSharding(pipeline.mesh, P()) if whole_batch else pipeline.batch_sharding
    state = state_like(model, pipeline, optimizer, step.init)
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=batch_sharding), example_batch(config)
    )
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - start
    has_dropout = dropout_seed(config, model) is not None
    # Between two calls, as a run holds it: without flush some arrays are in flight.
    return CompiledStep(compiled, step.between_calls(state), batch, has_dropout, compile_s, spec)
