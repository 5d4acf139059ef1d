"""Several calls, timed by turns, so that a machine that slows down for a while slows them all down."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpipe.bench.timing import Timing, timed


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
