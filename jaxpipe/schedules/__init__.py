"""Schedules as values: generators, rules, simulator and pictures. Nothing here imports JAX."""

from jaxpipe.schedules.action import NO_MICROBATCH, Action, Kind, parse_action
from jaxpipe.schedules.csv_form import from_csv, read_csv, to_csv
from jaxpipe.schedules.json_form import from_json, to_json
from jaxpipe.schedules.placement import Placement, linear
from jaxpipe.schedules.registry import REGISTRY, build
from jaxpipe.schedules.rules import RULES, Violation, check, violations
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.simulate import Costs, Timeline, peak_activations, simulate

__all__ = [
    "NO_MICROBATCH",
    "REGISTRY",
    "RULES",
    "Action",
    "Costs",
    "Kind",
    "Placement",
    "Schedule",
    "Timeline",
    "Violation",
    "build",
    "check",
    "from_csv",
    "from_json",
    "linear",
    "parse_action",
    "peak_activations",
    "read_csv",
    "simulate",
    "to_csv",
    "to_json",
    "violations",
]
