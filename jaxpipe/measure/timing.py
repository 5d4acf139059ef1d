"""How long does a call take, in wall time and in processor time of this process?"""

from __future__ import annotations

import ctypes
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


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


def time_by_turns(calls: Sequence[Callable[[], Any]], *, num_repeats: int) -> list[list[Timing]]:
    """[call][repeat]: each call once, then each again; a first turn is not counted.

    Processes that have joined begin each call together, and what they find is averaged.
    """
    timings: list[list[Timing]] = [[] for _ in calls]
    for repeat in range(num_repeats + 1):
        for call, found in zip(calls, timings, strict=True):
            _begin()
            timing = timed(call)
            if repeat:
                found.append(timing)
    return _mean(timings)


def spread_ratio(timings: Sequence[Timing]) -> float:
    """The interquartile range of the wall times by their median; 0 of a single one."""
    if len(timings) == 1:
        return 0.0
    first, middle, third = statistics.quantiles([timing.wall_s for timing in timings], n=4, method="inclusive")
    return (third - first) / middle


def _begin() -> None:
    """Returns once all processes have come; at once where there is one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("turn")


def _mean(timings: list[list[Timing]]) -> list[list[Timing]]:
    """The mean of what the processes found, of each number."""
    if jax.process_count() == 1:
        return timings
    mine = np.array([[(timing.wall_s, timing.cpu_s) for timing in found] for found in timings], np.float32)
    mean = np.asarray(multihost_utils.process_allgather(mine), np.float64).reshape(-1, *mine.shape).mean(axis=0)
    return [[Timing(*pair) for pair in found] for found in mean.tolist()]


# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MOST = 2**31 - 1


def keep_freed_memory() -> None:
    """Tells glibc's allocator to return nothing to the system; elsewhere it does nothing."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for option, value in ((_M_TRIM_THRESHOLD, _MOST), (_M_MMAP_MAX, 0), (_M_ARENA_MAX, 1)):
            mallopt(option, value)
