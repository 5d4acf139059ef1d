"""The predicted timeline: as long as the schedule's closed form says, in the unit that it names."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from jaxpipe.config import base_config, expected_costs
from jaxpipe.schedules import Costs, build
from jaxpipe.training.report import in_mean_forwards, write_timeline


def trace(path, *, layers_per_stage=(3, 3, 3, 3), recompute="none"):
    config = base_config()
    config.model.recompute = recompute
    schedule = build("1f1b", num_devices=4, num_microbatches=8)
    costs = expected_costs(config).of_layers(layers_per_stage)
    setup: Any = SimpleNamespace(
        spec=SimpleNamespace(schedule=schedule, stage_costs=costs),
        pipeline=SimpleNamespace(layers_per_stage=layers_per_stage),
    )
    write_timeline(path, setup)
    return json.loads((path / "timeline.json").read_text())


def microseconds(events):
    """When the last action ends."""
    return max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")


# 1F1B takes (N + D - 1) (forward + backward), Narayanan et al., SC 2021, section 2.2.1.
@pytest.mark.parametrize(("recompute", "backward"), [("none", 2), ("attention", 2), ("full", 3)])
def test_it_takes_as_long_as_the_closed_form(tmp_path, recompute, backward):
    events = trace(tmp_path, recompute=recompute)
    assert microseconds(events) == pytest.approx(1000 * (8 + 4 - 1) * (1 + backward))
    assert sum(event["ph"] == "X" for event in events) == 2 * 4 * 8


def test_the_unit_is_said(tmp_path):
    (label,) = [event for event in trace(tmp_path) if event["name"] == "process_labels"]
    assert label["args"]["labels"] == "predicted: 1 ms is a forward of 3 layers"


def test_a_stage_takes_as_long_as_its_layers(tmp_path):
    events = trace(tmp_path, layers_per_stage=(1, 2, 2, 3))
    forward = {event["args"]["stage"]: event["dur"] for event in events if event.get("cat") == "F"}
    assert forward == pytest.approx({0: 500, 1: 1000, 2: 1000, 3: 1500})


def test_costs_are_in_forwards_of_the_mean_stage():
    costs = Costs(forward=2.0, backward=6.0, input_gradient=4.0, weight_gradient=2.0, head_gradients=1.0)
    costs = in_mean_forwards(costs.of_layers((1, 3)))
    assert costs.head_gradients == pytest.approx(0.5)
    assert costs.forward == pytest.approx((0.5, 1.5))
    assert costs.backward == pytest.approx((1.5, 4.5))
    assert costs.input_gradient == pytest.approx((1.0, 3.0))
    assert costs.weight_gradient == pytest.approx((0.5, 1.5))
