"""What was timed of a step beside what is predicted of it, from the times of its layers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from step_cells import MICROBATCH_SIZE, Cell, config_of

from jaxpipe.cluster import parse_topology
from jaxpipe.config import build_schedule, expected_costs, layers_per_stage
from jaxpipe.estimate import Link, Measured, Measurement, Setting, Times, estimate, setting_of, stage_costs
from jaxpipe.lowering import lower, replay
from jaxpipe.measure import Timing, median, spread_ratio
from jaxpipe.schedules import Kind

TOPOLOGY = parse_topology("h200:1x2")  # two devices of a node; nothing that is asked for here depends on their kind
Clock = Literal["wall_s", "cpu_s"]


@dataclass(frozen=True)
class Prediction:
    """One cell.

    Attributes:
        cell: which.
        measured_s: median of the step's wall time.
        rows_s: by `estimate`, which has transfers behind actions, as on GPUs.
        predicted_s: of rounds whose permutes block, of the frame and the update.
        spread_ratio: interquartile range of the step's repeats by their median.
        work_ratio: processor time of the actions and the update, as predicted from processor times of the parts, and
            of the frame, by that of the step, in the mean of both processes.
    """

    cell: Cell
    measured_s: float
    rows_s: float
    predicted_s: float
    spread_ratio: float
    work_ratio: float

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted_s / self.measured_s


def predictions(group: dict[str, Any]) -> list[Prediction]:
    """Of the cells of a group, as it was timed."""
    wall, processor = (measured(group, clock) for clock in ("wall_s", "cpu_s"))
    found = []
    for fields, step, frame in zip(group["cells"], group["steps"], group["frames"], strict=True):
        cell, timings = Cell(**fields), _timings(step)
        setting = setting_of(config_of(cell), TOPOLOGY)
        found.append(
            Prediction(
                cell,
                measured_s=median(timings).wall_s,
                rows_s=estimate(setting, wall).step_s,
                predicted_s=_rounds_s(cell, wall.times(setting)) + _median(frame, "wall_s"),
                spread_ratio=spread_ratio(timings),
                work_ratio=(
                    (work_s(setting, processor.times(setting)) / setting.pipe + _median(frame, "cpu_s"))
                    / median(timings).cpu_s
                ),
            )
        )
    return found


def _rounds_s(cell: Cell, times: Times) -> float:
    """Of the rounds and the update."""
    config = config_of(cell)
    layers = layers_per_stage(config)
    table = lower(build_schedule(config), layers_per_stage=layers, costs=expected_costs(config), blocking=True)
    return replay(table, stage_costs(times, layers), blocking=True).makespan + times.update_s


def measured(group: dict[str, Any], clock: Clock) -> Measured:
    """The times of a group's model, as wall or as processor seconds."""
    measurement = Measurement(
        identity=group["identity"],
        subject=group["subject"],
        times={MICROBATCH_SIZE: Times(**group["times"][clock])},
        spread_ratio={MICROBATCH_SIZE: max(spread_ratio(_timings(run["timings"])) for run in group["runs"])},
        num_layer_parameters=group["num_layer_parameters"],
        num_shared_parameters=group["num_shared_parameters"],
        num_update_parameters=group["num_update_parameters"],
        link=Link(**group["link"]),
    )
    return Measured((measurement,))


def work_s(setting: Setting, times: Times) -> float:
    """Seconds of all actions and the updates of all devices together."""
    costs = stage_costs(times, setting.layers_per_stage)
    of_kind = (costs.forward, costs.backward, costs.input_gradient, costs.weight_gradient)
    columns = setting.schedule.columns
    seconds = (
        np.array(of_stage)[columns.stage[columns.is_kind(kind)]].sum()
        for kind, of_stage in zip((Kind.F, Kind.B, Kind.I, Kind.W), of_kind, strict=True)
    )
    return float(sum(seconds)) + setting.pipe * times.update_s


def _timings(found: list[dict[str, float]]) -> list[Timing]:
    return [Timing(**each) for each in found]


def _median(found: list[dict[str, float]], clock: Clock) -> float:
    return getattr(median(_timings(found)), clock)
