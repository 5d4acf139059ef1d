"""Schedules as values: generators, rules, simulator and pictures. Nothing here imports JAX."""

from jaxpipe.schedules.analysis.activations import Stored, Transfers, peak_activations, stored, transfers
from jaxpipe.schedules.analysis.costs import Costs, costs_of_stages
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.analysis.timeline import Timeline
from jaxpipe.schedules.csv_format import from_csv, read_csv, to_csv
from jaxpipe.schedules.files import from_json, read_json, read_schedule, to_json, write_schedule
from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import Option, parse_options, written_options
from jaxpipe.schedules.methods.registry import DELAYED, REGISTRY, build, find_method, register
from jaxpipe.schedules.ordering.optimize import optimize
from jaxpipe.schedules.ordering.problem import MemoryBound, Problem, peak_memory
from jaxpipe.schedules.passes.balance import balance
from jaxpipe.schedules.passes.split_backward import split_backward
from jaxpipe.schedules.placement import Placement, bidirectional, linear, looped, zig_zag
from jaxpipe.schedules.rules import RULES, Violation, check, violations
from jaxpipe.schedules.schedule import NO_MICROBATCH, Action, Kind, Schedule, parse_action
from jaxpipe.schedules.spec import ScheduleSpec

__all__ = [
    "DELAYED",
    "NO_MICROBATCH",
    "REGISTRY",
    "RULES",
    "Action",
    "Costs",
    "Formula",
    "Kind",
    "MemoryBound",
    "Method",
    "Option",
    "Placement",
    "Problem",
    "Schedule",
    "ScheduleSpec",
    "Stored",
    "Timeline",
    "Transfers",
    "Violation",
    "balance",
    "bidirectional",
    "build",
    "check",
    "costs_of_stages",
    "find_method",
    "from_csv",
    "from_json",
    "linear",
    "looped",
    "optimize",
    "parse_action",
    "parse_options",
    "peak_activations",
    "peak_memory",
    "read_csv",
    "read_json",
    "read_schedule",
    "register",
    "simulate",
    "split_backward",
    "stored",
    "to_csv",
    "to_json",
    "transfers",
    "violations",
    "write_schedule",
    "written_options",
    "zig_zag",
]
