"""The schedule's predicted timeline as a Chrome trace, to hold beside the profiler's trace of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.schedules import Costs, simulate
from jaxpipe.schedules.render import chrome_trace
from jaxpipe.training.setup import BACKWARD_COSTS, Setup

TIMELINE = "timeline.json"


def predicted_costs(layers_per_stage: Sequence[int], *, backward: float) -> Costs:
    """Costs in forwards of a stage with the mean number of layers.

    Args:
        layers_per_stage: [stage]; a stage costs as its layers do, embedding and head nothing.
        backward: of a layer, in forwards; where it is split, its part for the weights is one forward.
    """
    mean = sum(layers_per_stage) / len(layers_per_stage)
    forward = tuple(num / mean for num in layers_per_stage)
    return Costs(
        forward=forward,
        backward=tuple(backward * cost for cost in forward),
        input_gradient=tuple((backward - 1) * cost for cost in forward),
        weight_gradient=forward,
    )


def write_timeline(path: Path, setup: Setup) -> None:
    """Writes TIMELINE into the run's folder `path`: a millisecond of the trace is a forward of the mean stage."""
    schedule, layers_per_stage = setup.pipeline.schedule, setup.pipeline.layers_per_stage
    costs = predicted_costs(layers_per_stage, backward=BACKWARD_COSTS[setup.model.config.recompute])
    label = f"predicted: 1 ms is a forward of {sum(layers_per_stage) / len(layers_per_stage):g} layers"
    labels = {"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": label}}
    trace = [labels, *chrome_trace(schedule, simulate(schedule, costs))]
    (path / TIMELINE).write_text(json.dumps(trace) + "\n")
