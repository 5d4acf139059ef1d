"""Measures how long the parts of a step take on the device at hand."""

from jaxpipe.measure.measurement import measure
from jaxpipe.measure.timing import Timing, median, spread_ratio, time_by_turns, timed

__all__ = ["Timing", "measure", "median", "spread_ratio", "time_by_turns", "timed"]
