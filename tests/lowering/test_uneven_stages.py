"""Stages of unequal length, laid out for it, take as long as on the asynchronous clock."""

import jax
import numpy as np
import pytest
from tiers import tiers

from jaxpipe.config import base_config, build_schedule, check
from jaxpipe.estimate import resolve
from jaxpipe.lowering import lower, replay
from jaxpipe.schedules import REGISTRY, Costs, build, simulate
from jaxpipe.training.setup import build_pipeline

# BPipe's rounds keep step with backwards of two forwards, on all stages alike.
BOUNDS = {"bpipe": 1.04}


def three_then_two(num_stages: int) -> tuple[int, ...]:
    return tuple(3 if stage < 3 else 2 for stage in range(num_stages))


@pytest.mark.parametrize("num_devices", tiers([4], ci=[8]))
@pytest.mark.parametrize("name", REGISTRY)
def test_rounds_are_as_fast_as_rows(name, num_devices):
    schedule = build(name, num_devices=num_devices, num_microbatches=16)
    layers = three_then_two(schedule.num_stages)
    costs = Costs(backward=2.0).of_layers(layers)
    table = lower(schedule, layers_per_stage=layers, costs=costs)
    assert replay(table, costs).makespan <= BOUNDS.get(name, 1.001) * simulate(schedule, costs).makespan


def test_rounds_for_equal_stages_are_slower():
    schedule = build("hanayo", num_devices=8, num_microbatches=16)
    layers = three_then_two(schedule.num_stages)
    costs = Costs(backward=2.0).of_layers(layers)
    equal = lower(schedule, layers_per_stage=layers, costs=Costs(backward=2.0))
    assert replay(equal, costs).makespan > 1.04 * simulate(schedule, costs).makespan


def test_a_config_is_laid_out_for_its_stages():
    config = base_config("gpt")
    config.model.num_layers, config.mesh.pipe, config.pipeline.layers_per_stage = 10, 4, "2,1,1,1,1,1,1,2"
    config.pipeline.schedule, config.pipeline.num_microbatches = "hanayo", 8
    check(config)
    _, pipeline = build_pipeline(resolve(config), jax.devices()[:4])
    layers = (2, 1, 1, 1, 1, 1, 1, 2)
    table, equal = (
        lower(build_schedule(config), layers_per_stage=layers, costs=costs)
        for costs in (Costs(backward=2.0).of_layers(layers), Costs(backward=2.0))
    )
    np.testing.assert_array_equal(pipeline.table.rounds, table.rounds)
    assert not np.array_equal(pipeline.table.rounds, equal.rounds)
