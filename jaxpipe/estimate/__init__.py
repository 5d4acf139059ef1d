"""Predicted time and bytes of a training step: numbers only; no device is needed and nothing is compiled."""

from jaxpipe.estimate.costs import resolve, setting_of, stage_costs
from jaxpipe.estimate.memory import Bytes, fits, memory
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.estimate.step_collectives import Program
from jaxpipe.estimate.times import Link, Times, TimeSource

__all__ = [
    "Bytes",
    "Estimate",
    "Link",
    "Program",
    "Roofline",
    "Setting",
    "TimeSource",
    "Times",
    "estimate",
    "fits",
    "memory",
    "resolve",
    "setting_of",
    "stage_costs",
]
