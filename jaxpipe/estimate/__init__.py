"""Predicted time and bytes of a training step: numbers only; no device is needed and nothing is compiled."""

from jaxpipe.estimate.costs import costs_of, resolve, setting_of, stage_costs
from jaxpipe.estimate.measured import Measured, Measurement
from jaxpipe.estimate.memory import Bytes, fits, memory
from jaxpipe.estimate.products import Matmul
from jaxpipe.estimate.recompute import recomputations
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.setting import Group, Setting
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.estimate.step_collectives import Program, step_collectives
from jaxpipe.estimate.times import Link, Times, TimeSource
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.sharding import Shard

__all__ = [
    "Bytes",
    "Estimate",
    "Group",
    "Link",
    "Matmul",
    "Measured",
    "Measurement",
    "Program",
    "Roofline",
    "Setting",
    "Shard",
    "TimeSource",
    "Times",
    "costs_of",
    "estimate",
    "fits",
    "memory",
    "recomputations",
    "resolve",
    "setting_of",
    "stage_costs",
    "step_collectives",
    "traced_layer",
]
