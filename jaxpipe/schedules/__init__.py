"""Schedules as values: generators, rules, simulator and pictures. Nothing here imports JAX."""

from jaxpipe.schedules.action import NO_MICROBATCH, Action, Kind, parse_action
from jaxpipe.schedules.placement import Placement, linear
from jaxpipe.schedules.registry import REGISTRY, build
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.simulate import Costs, Timeline, peak_activations, simulate

__all__ = [
    "NO_MICROBATCH",
    "REGISTRY",
    "Action",
    "Costs",
    "Kind",
    "Placement",
    "Schedule",
    "Timeline",
    "build",
    "linear",
    "parse_action",
    "peak_activations",
    "simulate",
]
