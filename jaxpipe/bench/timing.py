"""How long does a call take, in wall time and in processor time of this process?"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Timing:
    """Of one call, in seconds."""

    wall_s: float
    cpu_s: float


def timed(call: Callable[[], Any]) -> Timing:
    """The time of `call`, until its results are there."""
    before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    jax.block_until_ready(call())
    wall_s, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return Timing(wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def median(timings: list[Timing]) -> Timing:
    """The median of each field: one disturbed repeat does not move it."""
    return Timing(
        statistics.median(timing.wall_s for timing in timings), statistics.median(timing.cpu_s for timing in timings)
    )
