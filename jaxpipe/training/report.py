"""What a run says of itself before its first step: schedule, predicted bubble, storage, devices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jaxpipe.program.shapes import StepShapes, bytes_per_device, held_bytes
from jaxpipe.schedules import Kind, peak_activations, simulate
from jaxpipe.training.setup import Setup
from jaxpipe.training.speed import in_words
from jaxpipe.training.step import TrainState


def report(setup: Setup, state: TrainState, batch: Any) -> str:
    """The lines to print at the start of a run."""
    pipeline, schedule = setup.pipeline, setup.pipeline.schedule
    num_params = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(pipeline.from_stages, state.params)))
    shapes, num_slots = pipeline.shapes(state.params, batch), pipeline.table.num_slots
    lines = [
        f"devices    {setup.devices.reason}",
        f"data       {setup.corpus.num_files} files, {len(setup.corpus.train):,} training tokens,"
        f" {len(setup.corpus.heldout):,} held out",
        f"model      {num_params:,} parameters, layers per stage {', '.join(map(str, pipeline.layers_per_stage))}",
        f"flops      {in_words(setup.model, pipeline, batch)}",
        f"schedule   {schedule.name}: {schedule.num_stages} stages on {schedule.num_devices} devices,"
        f" {schedule.num_microbatches} microbatches",
        f"bubble     {simulate(schedule, setup.costs).bubble_ratio:.1%} predicted, {_costs_in_words(setup)}",
        f"rounds     {pipeline.table.num_rounds}",
        f"slots      {num_slots:g} of {_mebibytes(shapes.storage.slot_bytes)} per device; the schedule's peak is"
        f" {peak_activations(schedule).max():g} Ma",
        f"bytes      per device: train state {_mebibytes(bytes_per_device(state))}, "
        + ", ".join(f"{kind} {_mebibytes(num_bytes)}" for kind, num_bytes in held_bytes(shapes).items()),
        *_split_backward_in_words(shapes),
    ]
    return "\n".join(lines)


def _costs_in_words(setup: Setup) -> str:
    """What is expected of the backwards that the schedule has."""
    columns, times = setup.pipeline.schedule.columns, setup.costs.of_kind(1)[:, 0]
    names = {Kind.B: "backward", Kind.I: "I", Kind.W: "W"}
    there = [kind for kind in names if columns.is_kind(kind).any()]
    return ", ".join(f"{names[kind]} = {times[kind] / times[Kind.F]:g}" for kind in there) + " forward"


def _split_backward_in_words(shapes: StepShapes) -> list[str]:
    """What a slot holds for I and then for W; nothing where all backwards are whole."""
    if not shapes.table.schedule.has_split_backward:
        return []
    saved, num_layers = shapes.storage.saved, shapes.storage.pages_per_slot
    until_backward = num_layers * _num_bytes(saved.residuals)
    for_weights = num_layers * _num_bytes((*(saved.residuals[i] for i in saved.shared_with_w), *saved.deferred))
    more = ": more than whole backwards keep at all" if for_weights > until_backward else ""
    return [
        f"halves     a slot has {_mebibytes(until_backward)} from F to I, as for a whole backward, and"
        f" {_mebibytes(for_weights)} from I to W{more}"
    ]


def _num_bytes(arrays: Iterable[jax.ShapeDtypeStruct]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"
