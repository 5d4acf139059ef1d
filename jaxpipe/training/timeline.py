"""The schedule's predicted timeline as a Chrome trace, to hold beside the profiler's trace of the run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.drawing import chrome_trace
from jaxpipe.schedules import Costs, Kind, simulate
from jaxpipe.training.setup import Setup

TIMELINE = "timeline.json"


def predicted_costs(layers_per_stage: Sequence[int], expected: Costs) -> Costs:
    """Costs in forwards of a stage with the mean number of layers.

    Args:
        layers_per_stage: [stage]; a stage costs as its layers do, embedding and head nothing.
        expected: of a stage with the mean number of layers, in any one unit; one number each.
    """
    times = expected.of_kind(1)[:, 0]
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    forward, backward, input_gradient, weight_gradient = (float(times[kind] / times[Kind.F]) for kind in kinds)
    return Costs(forward, backward, input_gradient, weight_gradient).of_layers(layers_per_stage)


def write_timeline(path: Path, setup: Setup) -> None:
    """Writes TIMELINE into the run's folder `path`: a millisecond of the trace is a forward of the mean stage."""
    schedule, layers_per_stage = setup.pipeline.schedule, setup.pipeline.layers_per_stage
    costs = predicted_costs(layers_per_stage, setup.costs)
    label = f"predicted: 1 ms is a forward of {sum(layers_per_stage) / len(layers_per_stage):g} layers"
    labels = {"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": label}}
    trace = [labels, *chrome_trace(simulate(schedule, costs))]
    (path / TIMELINE).write_text(json.dumps(trace) + "\n")
