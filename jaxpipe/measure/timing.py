"""Wall time and processor time of calls, timed by turns so that a slow spell of the machine slows them all."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpipe.distributed.gloo import tune_gloo


@dataclass(frozen=True)
class Timing:
    """Wall and processor time of one call, in seconds."""

    wall_s: float
    cpu_s: float


def timed(call: Callable[[], Any], *, num_steps: int = 1) -> Timing:
    """The time of a step of `call` until its results are ready.

    Args:
        num_steps: if above 1, `call` begins one step more in a row, and returns a list of what they bring. The first
            is not counted: processes begin it together, and without flush they are apart by a backward from then on.
    """
    start = time.perf_counter()
    before = _processor_s()
    results = call()
    # The first result is awaited before the clock starts anew; the steps after it are already on the way.
    if num_steps > 1:
        jax.block_until_ready(results[0])
        start = time.perf_counter()
        before = _processor_s()
    jax.block_until_ready(results)
    return Timing((time.perf_counter() - start) / num_steps, (_processor_s() - before) / num_steps)


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def median(timings: list[Timing]) -> Timing:
    """The median of each field, which one disturbed repeat does not move."""
    return Timing(
        statistics.median(timing.wall_s for timing in timings), statistics.median(timing.cpu_s for timing in timings)
    )


def time_by_turns(calls: Sequence[Callable[[], Any]], *, num_repeats: int) -> list[list[Timing]]:
    """Timings [call][repeat] of calls that take turns; the first turn is not counted.

    Joined processes begin each call together, and their timings are averaged.
    """
    timings: list[list[Timing]] = [[] for _ in calls]
    for repeat in range(num_repeats + 1):
        for call, of_call in zip(calls, timings, strict=True):
            _begin()
            timing = timed(call)
            if repeat:
                of_call.append(timing)
    return _mean(timings)


def spread_ratio(timings: Sequence[Timing]) -> float:
    """The interquartile range of the wall times over their median; 0 for a single timing."""
    if len(timings) == 1:
        return 0.0
    # Inclusive: few repeats are all there is, not a sample of more.
    first, middle, third = statistics.quantiles([timing.wall_s for timing in timings], n=4, method="inclusive")
    return (third - first) / middle


def _begin() -> None:
    """Waits until all processes have arrived; the first turn has connected them."""
    if jax.process_count() > 1:
        # Before the barrier, which is itself a collective over Gloo.
        tune_gloo()
        multihost_utils.sync_global_devices("turn")


def _mean(timings: list[list[Timing]]) -> list[list[Timing]]:
    if jax.process_count() == 1:
        return timings
    # Float32 is what a gather takes without x64; times need no more digits.
    mine = np.array([[(timing.wall_s, timing.cpu_s) for timing in of_call] for of_call in timings], np.float32)
    mean = np.asarray(multihost_utils.process_allgather(mine), np.float64).reshape(-1, *mine.shape).mean(axis=0)
    return [[Timing(*pair) for pair in of_call] for of_call in mean.tolist()]
