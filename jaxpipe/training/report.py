"""What a run says of itself before its first step: schedule, predicted bubble, storage, devices."""

from __future__ import annotations

from typing import Any

import jax

from jaxpipe.program.accounting import bytes_per_device, held_bytes
from jaxpipe.schedules import peak_activations, simulate
from jaxpipe.training.setup import Setup
from jaxpipe.training.speed import in_words
from jaxpipe.training.step import TrainState


def report(setup: Setup, state: TrainState, batch: Any) -> str:
    """The lines to print at the start of a run."""
    pipeline, schedule = setup.pipeline, setup.pipeline.schedule
    num_params = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(pipeline.from_stages, state.params)))
    slot_bytes = pipeline.slot_bytes(state.params, batch)
    num_slots = pipeline.table.num_slots
    held = held_bytes(pipeline, state.params, batch)
    lines = [
        f"devices    {setup.devices.reason}",
        f"data       {setup.corpus.num_files} files, {len(setup.corpus.train):,} training tokens,"
        f" {len(setup.corpus.heldout):,} held out",
        f"model      {num_params:,} parameters, layers per stage {', '.join(map(str, pipeline.layers_per_stage))}",
        f"flops      {in_words(setup.model, pipeline, batch)}",
        f"schedule   {schedule.name}: {schedule.num_stages} stages on {schedule.num_devices} devices,"
        f" {schedule.num_microbatches} microbatches",
        f"bubble     {simulate(schedule).bubble_ratio:.1%} predicted, backward = 2 forward",
        f"rounds     {pipeline.table.num_rounds}",
        f"slots      {num_slots:g} of {_mebibytes(slot_bytes)} per device; the schedule's peak is"
        f" {peak_activations(schedule).max():g} Ma",
        f"bytes      per device: train state {_mebibytes(bytes_per_device(state))}, "
        + ", ".join(f"{kind} {_mebibytes(num_bytes)}" for kind, num_bytes in held.items()),
    ]
    return "\n".join(lines)


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f} MiB"
