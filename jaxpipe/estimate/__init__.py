"""Predicted time and bytes of a training step: numbers only; no device is needed and nothing is compiled."""

from jaxpipe.estimate.costs import decide_costs, setting_of, stage_costs
from jaxpipe.estimate.memory import Bytes, fits, memory
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.step import Estimate, Program, estimate
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
    "decide_costs",
    "estimate",
    "fits",
    "memory",
    "setting_of",
    "stage_costs",
]
