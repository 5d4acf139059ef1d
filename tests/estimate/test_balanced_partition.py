"""Balanced partitions against every partition there is."""

import random
from itertools import combinations, pairwise

import numpy as np
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.estimate.clock import Seconds, makespans
from jaxpipe.estimate.partition import balanced_partition
from jaxpipe.schedules import build
from jaxpipe.schedules.analysis.simulate import clock_of
from jaxpipe.schedules.schedule import Kind

NUM_DEVICES = {"1f1b": 4, "zb_v": 2, "interleaved_1f1b": 2, "hanayo": 3, "chimera": 4, "bitpipe": 2}
ONE_STAGE = [[0], [1], [2], [3]]


def held_by(name: str) -> list[list[int]]:
    placement = build(name, num_devices=NUM_DEVICES[name], num_microbatches=2).placement
    return [[stage for _, stage in chunks] for chunks in placement.stages_of]


def every_partition(num_layers: int, num_stages: int):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *cuts, num_layers)
        yield tuple(end - begin for begin, end in pairwise(edges))


def times_of(counts, layers, held, first=0.0, last=0.0) -> list[float]:
    begin, stages = 0, []
    for count in counts:
        stages.append(sum(layers[begin : begin + count]))
        begin += count
    stages[0] += first
    stages[-1] += last
    return [sum(stages[stage] for stage in device) for device in held]


@pytest.mark.parametrize("name", NUM_DEVICES)
@pytest.mark.parametrize(("first", "last"), [(0.0, 0.0), (0.4, 2.7), (3.2, 0.1)])
def test_no_partition_of_equal_layers_is_better(name, first, last):
    held = held_by(name)
    num_stages = 1 + max(map(max, held))
    for num_layers in (num_stages, num_stages + 3, num_stages + 6):
        layers = [1.0] * num_layers
        ours = balanced_partition(layers, held, first=first, last=last)
        best = min(max(times_of(c, layers, held, first, last)) for c in every_partition(num_layers, num_stages))
        assert sum(ours) == num_layers
        assert min(ours) >= 1
        assert max(times_of(ours, layers, held, first, last)) == pytest.approx(best)


@pytest.mark.parametrize("seed", range(12))
def test_no_partition_of_unequal_layers_on_a_stage_each_is_better(seed):
    draw = random.Random(seed)
    layers = [draw.choice((0.3, 1.0, draw.uniform(0.1, 4.0))) for _ in range(draw.randint(4, 12))]
    first, last = draw.uniform(0.0, 3.0), draw.uniform(0.0, 3.0)
    ours = balanced_partition(layers, ONE_STAGE, first=first, last=last)
    best = min(max(times_of(c, layers, ONE_STAGE, first, last)) for c in every_partition(len(layers), 4))
    assert max(times_of(ours, layers, ONE_STAGE, first, last)) == pytest.approx(best)


def step_s(schedule, counts, layers) -> float:
    """The makespan of stages of so many of `layers`; a backward takes two forwards, messages take nothing."""
    stage_s = np.add.reduceat(layers, np.cumsum((0, *counts[:-1])))
    of_kind = np.zeros((len(Kind), len(counts)))
    for kind, forwards in ((Kind.F, 1.0), (Kind.B, 2.0), (Kind.I, 1.0), (Kind.W, 1.0)):
        of_kind[kind] = forwards * stage_s
    none, links = np.zeros(len(counts)), np.zeros((schedule.num_devices, schedule.num_devices))
    return makespans(clock_of(schedule), Seconds(of_kind, none, links, links, 0.0, none, none)).computed_s


@pytest.mark.parametrize(("name", "gain"), [("1f1b", 1.1), ("zb_h1", 1.1), ("gpipe", 1.1), ("zb_v", 1.0)])
def test_where_the_first_half_of_the_layers_is_half_as_dear_stages_of_equal_time_are_faster(name, gain):
    """By a tenth and more; a V has a cheap and a dear stage on each device, so equal stages are balanced already."""
    schedule = build(name, num_devices=4, num_microbatches=32)
    held = [[stage for _, stage in chunks] for chunks in schedule.placement.stages_of]
    layers = [0.5] * 16 + [1.0] * 16
    equal = (32 // schedule.num_stages,) * schedule.num_stages
    assert gain * step_s(schedule, balanced_partition(layers, held), layers) <= step_s(schedule, equal, layers)


@pytest.mark.parametrize("seed", range(12))
def test_of_unequal_layers_on_several_stages_a_device_none_is_far_better(seed):
    """The best has at least what its largest stage has; ours starts from the least such and then only improves."""
    draw = random.Random(seed)
    held = held_by(draw.choice(("zb_v", "interleaved_1f1b")))
    layers = [draw.choice((0.5, 1.0, 2.0)) for _ in range(draw.randint(6, 12))]
    ours = balanced_partition(layers, held)
    best = min(max(times_of(c, layers, held)) for c in every_partition(len(layers), 4))
    assert max(times_of(ours, layers, held)) <= best + max(layers)


@pytest.mark.parametrize("seed", range(12))
def test_bytes_bound_what_a_device_holds(seed):
    draw = random.Random(seed)
    layers = [draw.uniform(0.5, 2.0) for _ in range(9)]
    sizes = [float(draw.randint(1, 3)) for _ in range(9)]
    most = float(draw.randint(4, 9))
    legal = [c for c in every_partition(9, 4) if max(times_of(c, sizes, ONE_STAGE)) <= most]
    if not legal:
        with pytest.raises(ConfigError, match="partition-memory"):
            balanced_partition(layers, ONE_STAGE, sizes=sizes, most=most)
        return
    ours = balanced_partition(layers, ONE_STAGE, sizes=sizes, most=most)
    assert max(times_of(ours, sizes, ONE_STAGE)) <= most
    best = min(max(times_of(c, layers, ONE_STAGE)) for c in legal)
    assert max(times_of(ours, layers, ONE_STAGE)) == pytest.approx(best)


def test_a_stage_without_a_layer_is_refused():
    with pytest.raises(ConfigError, match="layer-per-stage"):
        balanced_partition([1.0] * 3, ONE_STAGE)
