"""What is known of a step before it runs: its time in the simulator, its bubble and its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ml_collections import ConfigDict

from jaxpipe.compile import predict, training_step
from jaxpipe.config import expected_costs
from jaxpipe.lowering import replay
from jaxpipe.schedules import Costs, simulate


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
    of = training_step(config, devices, gpus_per_node=gpus_per_node)
    pipeline = of.pipeline
    forward = config.model.num_layers / pipeline.schedule.num_stages
    costs = Costs(forward=forward, backward=forward * expected_costs(config).backward)
    prediction = predict(of.step, of.state, of.batch, has_dropout=of.has_dropout)
    return Predicted(
        step_layers=float(replay(pipeline.table, costs).makespan),
        bubble_ratio=float(simulate(pipeline.schedule, costs).bubble_ratio),
        total_bytes=prediction.total_bytes,
    )
