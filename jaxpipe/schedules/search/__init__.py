"""The search for a short schedule that keeps a bound on memory; `optimize` is the way in."""

from jaxpipe.schedules.search.memory_bound import MemoryBound, peak_memory
from jaxpipe.schedules.search.optimize import NUM_TRIALS, Clock, Found, asynchronous, optimize, search
from jaxpipe.schedules.search.problem import Problem, usual_placements
from jaxpipe.schedules.search.stage_costs import costs_of_stages

__all__ = [
    "NUM_TRIALS",
    "Clock",
    "Found",
    "MemoryBound",
    "Problem",
    "asynchronous",
    "costs_of_stages",
    "optimize",
    "peak_memory",
    "search",
    "usual_placements",
]
