"""The actions of the first, a middle and the last stage inside the compiled program, by `jaxpipe.measure`.

Its measurements are `costs.json`, which `jaxpipe.plan --costs` and `pipeline.costs` take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial

import jax

from experiments.gpu.cells import Cell, Part, Record, Size
from experiments.gpu.layers import SHAPES, Shape, config_of
from jaxpipe.cluster import Topology
from jaxpipe.estimate import Roofline, Times, setting_of
from jaxpipe.measure import measure

NUM_LAYERS = 1  # of each stage


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each layer that one device holds whole, without recomputation."""
    for shape in SHAPES[: 1 if size.quick else 2]:
        yield Cell(shape.name, partial(_stages, size, shape))


PART = Part("stages", "Stages in the program", cells, minutes=2)


def _stages(size: Size, shape: Shape) -> Record:
    config = config_of(shape, size, num_layers=3 * NUM_LAYERS)
    devices = [device for device in jax.local_devices() if device == size.device]
    found = measure(
        config,
        devices,
        microbatch_sizes=[shape.batch],
        num_layers=NUM_LAYERS,
        num_repeats=size.num_repeats,
    )
    record: Record = {"costs": found.to_json()}
    record["ms"] = _milliseconds(found.times[shape.batch])
    record["spread"] = found.spread_ratio[shape.batch]
    if size.hardware:
        topology = Topology(size.hardware, 1, 1)
        record["estimated_ms"] = _milliseconds(Roofline(size.hardware).times(setting_of(config, topology)))
    return record


def _milliseconds(times: Times) -> dict[str, float]:
    """The times that are known, by name."""
    return {name.removesuffix("_s"): 1e3 * each for name, each in asdict(times).items() if each is not None}
