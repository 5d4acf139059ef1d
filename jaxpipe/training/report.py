"""The report of a run before its first step: devices, schedule, predicted bubble, bytes, and whether they fit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.cluster import ORDERS
from jaxpipe.cluster.axes import told
from jaxpipe.config.run_spec import RunSpec
from jaxpipe.drawing import chrome_trace
from jaxpipe.errors import ConfigError
from jaxpipe.lowering.pairs import computed_pairs
from jaxpipe.mesh.devices import by_node
from jaxpipe.program.held_bytes import bytes_per_device, held_bytes
from jaxpipe.program.shapes import StepShapes
from jaxpipe.schedules import Costs, Kind, peak_activations, simulate
from jaxpipe.schedules.passes.overlap import num_pairs
from jaxpipe.training.run_step import Step
from jaxpipe.training.setup import Setup, mesh_order
from jaxpipe.training.speed import format_flops
from jaxpipe.training.step import TrainState
from jaxpipe.units import MA, gib, mib


def report(setup: Setup, step: Step, state: TrainState, batch: Any, *, optimizer_is_given: bool = False) -> str:
    """The lines to print at the start of a run; docs/train.md explains them."""
    pipeline = setup.pipeline
    spec = setup.spec
    schedule = spec.schedule
    # Counted in the model's own order: staged parameters also have rows that a shorter stage does not use.
    num_params = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(pipeline.from_stages, state.params)))
    shapes = step.shapes(state.params, batch)
    num_slots = step.table.num_slots
    predicted = simulate(computed_pairs(schedule), spec.stage_costs)
    lines = [
        f"devices    {setup.devices.reason}",
        f"data       {setup.task.data}",
        f"model      {num_params:,} parameters, layers per stage {', '.join(map(str, pipeline.layers_per_stage))}",
        f"flops      {format_flops(setup.task.model, pipeline, batch)}",
        *spec.lines(places_of(spec, setup.devices.devices), optimizer_is_given=optimizer_is_given),
        f"schedule   {schedule.name}: {schedule.num_stages} stages on {schedule.num_devices} devices,"
        f" {schedule.batch_size} microbatches{', without flush' if schedule.delays else ''}",
        *_format_pairs(spec),
        f"bubble     {predicted.bubble_ratio:.1%} predicted, {_format_costs(spec)}",
        f"rounds     {step.table.rounds_per_call} in the compiled step",
        f"slots      {num_slots:g} on each device, each {_mebibytes(shapes.slot_bytes)}: what a stage keeps of"
        " a microbatch for its backward",
        f"peak       {peak_activations(schedule).max():g} Ma; {MA}",
        f"bytes      on each device: train state {_mebibytes(bytes_per_device(state))}, "
        + ", ".join(f"{kind} {_mebibytes(size)}" for kind, size in held_bytes(shapes).items() if size),
        *_format_split(shapes),
    ]
    return "\n".join(lines)


def places_of(spec: RunSpec, devices: Sequence[Any]) -> str:
    """Where the devices of the mesh stand, in words: what `mesh.order` decides, with "auto" what it has decided."""
    num_nodes = len(by_node(devices))
    if num_nodes == 1:
        return "all devices in one node"
    order, _ = mesh_order(spec, devices, None)
    return f"{num_nodes} nodes, {order}: {ORDERS[order]}"


def _format_pairs(spec: RunSpec) -> list[str]:
    """A line on forwards and backwards that are one action; none if nobody asks for them."""
    if not (spec.config.pipeline.overlap or spec.schedule.has_pairs):
        return []
    num_forwards = int(spec.schedule.columns.is_kind(Kind.F).sum())
    return [f"pairs      {num_pairs(spec.schedule)} of {num_forwards} forwards are one action with a backward"]


def _format_costs(spec: RunSpec) -> str:
    """The expected time of each kind of backward that the schedule has, in forwards."""
    schedule = spec.schedule
    columns = schedule.columns
    times = spec.stage_costs.of_kind(schedule.num_stages).mean(axis=1)
    names = {Kind.B: "backward", Kind.I: "I", Kind.W: "W"}
    # A schedule may have whole and split backwards; costs of kinds that it lacks say nothing of it.
    there = [kind for kind in names if columns.is_kind(kind).any()]
    ratios = ", ".join(f"{names[kind]} = {times[kind] / times[Kind.F]:g}" for kind in there)
    return f"{ratios} forwards ({spec.costs_source})"


def _format_split(shapes: StepShapes) -> list[str]:
    """A line on the bytes that a slot stores for I and then for W; none if no backward is split."""
    if not shapes.table.schedule.has_split_backward:
        return []
    saved = shapes.storage.saved
    num_layers = shapes.storage.pages_per_slot
    until_backward = num_layers * _num_bytes(saved.residuals)
    # Arrays that I and W both read stay in the slot; deferred ones replace the rest.
    for_weights = num_layers * _num_bytes((*(saved.residuals[i] for i in saved.shared_with_w), *saved.deferred))
    return [
        f"split      of a microbatch a stage keeps {_mebibytes(until_backward)} from F to I, and then"
        f" {_mebibytes(for_weights)} until W; a whole backward would keep {_mebibytes(until_backward)} until B"
    ]


def _num_bytes(arrays: Iterable[jax.ShapeDtypeStruct]) -> int:
    return sum(array.size * array.dtype.itemsize for array in arrays)


def _mebibytes(num_bytes: int) -> str:
    return f"{mib(num_bytes)} MiB"


# ---- Whether the step fits the devices, before anything is compiled


def check_memory(step: Step, state: TrainState, batch: Any, *, limit_bytes: int | None = None) -> None:
    """Raises ConfigError for a step that needs more memory than a device has.

    The check is a lower bound: the train state and `held_bytes`, which live between actions. The workspace of an action
    comes on top; `jaxpipe.compile` predicts it and checks it on the compiled program.

    Args:
        state: shapes with shardings.
        batch: leaves [num_microbatches, microbatch size, ...], or their shapes.
        limit_bytes: memory of a device; None asks the first device of this process and skips the check if it does not
            know.
    """
    if limit_bytes is None:
        # CPUs return None. All devices of a mesh are of one kind, so the first stands for all.
        stats = step.pipeline.mesh.local_devices[0].memory_stats() or {}
        limit_bytes = stats.get("bytes_limit")
    # Shapes alone: the check runs before any array of the state is made.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    parts = {"train state": bytes_per_device(state), **held_bytes(step.shapes(state.params, shapes))}
    needed = sum(parts.values())
    if limit_bytes is None or needed <= limit_bytes:
        return
    picture = ", ".join(f"{kind} {gib(num, '.3g')}" for kind, num in parts.items() if num)
    more = " or ".join(f"mesh.{axis}" for axis in told(step.pipeline.mesh.shape))
    raise ConfigError(
        f"a step needs at least {gib(needed, '.3g')} GiB on each device, which has {gib(limit_bytes, '.3g')} GiB",
        rule="memory: the train state and what the schedule stores fit the device",
        picture=f"GiB: {picture}",
        repair=(
            f"more {more}, pipeline.schedule='bpipe', smaller"
            " microbatches (more pipeline.num_microbatches), or model.recompute='full';"
            " `python -m jaxpipe.compile` shows the bytes of a step"
        ),
    )


# ---- The predicted timeline as a Chrome trace, to compare with the profiler's trace of the run

TIMELINE = "timeline.json"
# The fields of `Costs` that are actions; messages and updates are left out.
_COMPUTE = ("forward", "backward", "input_gradient", "weight_gradient", "head_statistics", "head_gradients")


def in_mean_forwards(costs: Costs) -> Costs:
    """The costs of compute actions in units of the mean stage's forward; messages take no time."""
    mean = float(np.mean(costs.forward))
    times: dict[str, Any] = {}
    for name in _COMPUTE:
        # A field is a number, or a tuple by stage; `Costs` compares and hashes tuples alone.
        time = np.divide(getattr(costs, name), mean).tolist()
        times[name] = tuple(time) if isinstance(time, list) else time
    return Costs(**times)


def write_timeline(path: Path, setup: Setup) -> None:
    """Writes TIMELINE into the run's folder `path`, where a millisecond is a forward of the mean stage."""
    layers_per_stage = setup.pipeline.layers_per_stage
    costs = in_mean_forwards(setup.spec.stage_costs)
    label = f"predicted: 1 ms is a forward of {sum(layers_per_stage) / len(layers_per_stage):g} layers"
    labels = {"name": "process_labels", "ph": "M", "pid": 0, "args": {"labels": label}}
    trace = [labels, *chrome_trace(simulate(setup.spec.schedule, costs))]
    (path / TIMELINE).write_text(json.dumps(trace) + "\n")
