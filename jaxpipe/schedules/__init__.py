"""Schedules as values: generators, rules, simulator and pictures. Nothing here imports JAX."""

from jaxpipe.schedules.action import NO_MICROBATCH, Action, Kind, parse_action
from jaxpipe.schedules.balance import balance
from jaxpipe.schedules.csv_form import from_csv, read_csv, to_csv
from jaxpipe.schedules.files import read_schedule, write_schedule
from jaxpipe.schedules.json_form import from_json, read_json, to_json
from jaxpipe.schedules.memory import Stored, peak_activations, stored
from jaxpipe.schedules.methods.registry import REGISTRY, build
from jaxpipe.schedules.placement import Placement, bidirectional, linear, looped, zig_zag
from jaxpipe.schedules.rules import RULES, Violation, check, violations
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.search import MemoryBound, Problem, costs_of_stages, optimize, peak_memory
from jaxpipe.schedules.simulate import Costs, Timeline, simulate
from jaxpipe.schedules.split_backward import split_backward
from jaxpipe.schedules.transfers import Transfers, transfers

__all__ = [
    "NO_MICROBATCH",
    "REGISTRY",
    "RULES",
    "Action",
    "Costs",
    "Kind",
    "MemoryBound",
    "Placement",
    "Problem",
    "Schedule",
    "Stored",
    "Timeline",
    "Transfers",
    "Violation",
    "balance",
    "bidirectional",
    "build",
    "check",
    "costs_of_stages",
    "from_csv",
    "from_json",
    "linear",
    "looped",
    "optimize",
    "parse_action",
    "peak_activations",
    "peak_memory",
    "read_csv",
    "read_json",
    "read_schedule",
    "simulate",
    "split_backward",
    "stored",
    "to_csv",
    "to_json",
    "transfers",
    "violations",
    "write_schedule",
    "zig_zag",
]
