"""Times of a layer's F, B, I and W and of embedding and head, from timed runs of some actions of a program.

A run takes the sum of its actions' times and a constant. So the times solve a small linear system, one equation a run,
by non-negative least squares of the relative errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import nnls

from jaxpipe.estimate import Times
from jaxpipe.measure.stages import NUM_MICROBATCHES, NUM_STAGES, Stages, no_actions, some_actions
from jaxpipe.program import Pipeline
from jaxpipe.schedules.schedule import Kind

Counts = dict[str, int]  # number of times that a run contains each unknown

# The time of a step without any action, with whole and with split backwards.
_REST, _REST_OF_SPLIT = "rest_s", "rest_of_split_s"
_LAYER = {
    Kind.F: "layer_forward_s",
    Kind.B: "layer_backward_s",
    Kind.I: "layer_input_gradient_s",
    Kind.W: "layer_weight_gradient_s",
}


@dataclass(frozen=True)
class Run:
    """A run of some actions of a program.

    Attributes:
        call: executes the actions.
        counts: number of times that the run contains each unknown.
    """

    call: Callable[[], Any]
    counts: Counts


def compile_runs(stages: Stages) -> list[Run]:
    """The compiled runs to time, from which `times_of` finds the times of `stages`."""
    return [
        *_runs(stages, stages.whole, (Kind.F, Kind.B), _REST),
        *_runs(stages, stages.halves, (Kind.F, Kind.I, Kind.W), _REST_OF_SPLIT),
    ]


def times_of(runs: Sequence[tuple[Counts, float]], *, update_s: float) -> Times:
    """The times of the actions, from the timed runs of `compile_runs`.

    Args:
        runs: for each run, its counts and its time in seconds.
        update_s: the time of the rest of a step, measured separately.
    """
    found = solve(runs)
    return Times(
        **{name: value for name, value in found.items() if name not in (_REST, _REST_OF_SPLIT)}, update_s=update_s
    )


def solve(runs: Sequence[tuple[Counts, float]]) -> dict[str, float]:
    """The seconds of each unknown, by non-negative least squares.

    Args:
        runs: for each run, its counts and its time in seconds.

    Example:
        >>> {name: round(value, 3) for name, value in solve([({"a": 1}, 2.0), ({"a": 1, "b": 4}, 10.0)]).items()}
        {'a': 2.0, 'b': 2.0}
    """
    names = list(dict.fromkeys(name for counts, _ in runs for name in counts))
    rows = np.array([[counts.get(name, 0) / seconds for name in names] for counts, seconds in runs])
    # Scale the columns to one size, else the smallest are lost beside the largest.
    size = np.linalg.norm(rows, axis=0)
    found, _ = nnls(rows / size, np.ones(len(runs)))
    return dict(zip(names, (found / size).tolist(), strict=True))


def _runs(stages: Stages, pipeline: Pipeline, kinds: Sequence[Kind], rest: str) -> list[Run]:
    """Runs with no action, then for each stage with F alone, with F and its first backward kind, and with all kinds."""
    call = stages.compile_some(pipeline)
    runs = [Run(partial(call, no_actions(pipeline)), {rest: 1})]
    for stage in range(NUM_STAGES):
        for number in range(1, len(kinds) + 1):
            some = kinds[:number]
            counts = {_LAYER[kind]: NUM_MICROBATCHES * stages.num_layers for kind in some}
            ends = {name: NUM_MICROBATCHES for kind in some if (name := _end_of(stage, kind))}
            runs.append(Run(partial(call, some_actions(pipeline, stage, some)), {rest: 1, **counts, **ends}))
    return runs


def _end_of(stage: int, kind: Kind) -> str | None:
    """The unknown that a stage's action contains besides its layers: embedding, head or None."""
    if stage == NUM_STAGES - 1 and kind == Kind.F:
        return "head_s"
    if stage == 0 and kind in (Kind.F, Kind.B, Kind.I):
        return "embed_forward_s" if kind == Kind.F else "embed_backward_s"
    return None
