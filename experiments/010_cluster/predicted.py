"""What is known of a step before it runs: its time in the simulator, its bubble and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpipe.compile import predict
from jaxpipe.config.costs import BACKWARD_COSTS
from jaxpipe.estimate import resolve
from jaxpipe.lowering import replay
from jaxpipe.schedules import Costs, simulate
from jaxpipe.training.batches import example_batch
from jaxpipe.training.setup import build_pipeline, dropout_seed, optimizer_and_step
from jaxpipe.training.step import state_like


@dataclass(frozen=True)
class Predicted:
    """Of the training step of one config.

    Attributes:
        step_layers: its time on the clock of the compiled program, in forwards of a layer; messages at no cost.
        bubble_ratio: of the schedule on the asynchronous clock.
        total_bytes: that each device needs.
    """

    step_layers: float
    bubble_ratio: float
    total_bytes: int


def predicted(config: ConfigDict, devices: Sequence[Any], *, gpus_per_node: int | None) -> Predicted:
    """What is predicted of a checked config's step on `devices`, which need not be there."""
    model, pipeline = build_pipeline(resolve(config), devices, gpus_per_node=gpus_per_node)
    optimizer, step = optimizer_and_step(resolve(config), model, pipeline)
    forward = config.model.num_layers / pipeline.schedule.num_stages
    costs = Costs(forward=forward, backward=forward * BACKWARD_COSTS[config.model.recompute])
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=pipeline.batch_sharding)
        for name, leaf in example_batch(config).items()
    }
    has_dropout = dropout_seed(config, model) is not None
    prediction = predict(step, state_like(model, pipeline, optimizer), batch, has_dropout=has_dropout)
    return Predicted(
        step_layers=float(replay(pipeline.table, costs).makespan),
        bubble_ratio=float(simulate(pipeline.schedule, costs).bubble_ratio),
        total_bytes=prediction.total_bytes,
    )
