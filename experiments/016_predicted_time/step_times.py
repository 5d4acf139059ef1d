"""Times whole training steps of two processes, by turns with the layers that they are made of.

Goes in: the cells of a group, one model. Comes out: all that was timed, as JSON has it. Both processes time layers at
once, each on its core, so that they share caches and memory as they do in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import numpy as np
from step_cells import MICROBATCH_SIZE, NUM_DEVICES, Cell, config_of

from jaxpipe.estimate import resolve
from jaxpipe.measure.actions import compile_runs, make_stages
from jaxpipe.measure.measurement import compile_update, identity_of, link_between, num_parameters, subject_of_config
from jaxpipe.measure.timing import time_by_turns
from jaxpipe.training.batches import example_batch, put_batch
from jaxpipe.training.setup import build_pipeline, optimizer_and_step
from jaxpipe.training.step import init_state

NUM_LAYERS = 4  # of each of the three stages that are timed: as many as a stage of the steps has


def time_group(cells: tuple[Cell, ...], *, num_repeats: int) -> dict[str, Any]:
    """Of a layer's parts, the update and each cell's step: [call][repeat] wall and processor seconds of one process."""
    config = config_of(cells[0])
    start = time.monotonic()
    stages = make_stages(config, jax.local_devices(), microbatch_size=MICROBATCH_SIZE, num_layers=NUM_LAYERS)
    runs = compile_runs(stages)
    calls: list[Callable[[], Any]] = [
        compile_update(stages),
        *(run.call for run in runs),
        *(_compile_step(cell) for cell in cells),
        *(_compile_frame(cell) for cell in cells),
    ]
    compiled_s = time.monotonic() - start
    update, *rest = [[asdict(timing) for timing in found] for found in time_by_turns(calls, num_repeats=num_repeats)]
    elapsed_s = time.monotonic() - start
    return {
        "compiled_s": compiled_s,
        "elapsed_s": elapsed_s,
        "cells": [asdict(cell) for cell in cells],
        "subject": subject_of_config(config),
        "identity": identity_of(jax.local_devices()[0], num_repeats=num_repeats, num_layers=NUM_LAYERS),
        **num_parameters(stages.whole, stages.params, num_layers=stages.config.model.num_layers),
        "link": asdict(link_between(jax.devices(), num_repeats=num_repeats)),
        "update": update,
        "runs": [{"counts": run.counts, "timings": each} for run, each in zip(runs, rest, strict=False)],
        "steps": rest[len(runs) : len(runs) + len(cells)],
        "frames": rest[len(runs) + len(cells) :],
    }


def _compile_step(cell: Cell) -> Callable[[], Any]:
    """The compiled () -> metrics, of steps one after the other."""
    config = config_of(cell)
    model, pipeline = build_pipeline(resolve(config), jax.devices())
    optimizer, step = optimizer_and_step(resolve(config), model, pipeline)
    state, batch = init_state(model, pipeline, optimizer, seed=0), put_batch(pipeline, example_batch(config))
    compiled = step.lower(state, batch).compile()

    def run() -> Any:
        nonlocal state
        state, metrics = compiled(state, lambda: batch)
        return state, metrics

    return run


def _compile_frame(cell: Cell) -> Callable[[], Any]:
    """The same program without its actions and without the update: rounds, permutes, sums and copies over devices."""
    config = config_of(cell)
    model, pipeline = build_pipeline(resolve(config), jax.devices())
    optimizer, _ = optimizer_and_step(resolve(config), model, pipeline)
    params = init_state(model, pipeline, optimizer, seed=0).params
    batch = put_batch(pipeline, example_batch(config))
    nothing = np.zeros((pipeline.table.num_rounds, NUM_DEVICES), bool)
    compiled = pipeline.run_subset.lower(nothing, params, batch, 1.0).compile()
    return lambda: compiled(nothing, params, batch, 1.0)
