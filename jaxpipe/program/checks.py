"""Refuses what cannot be compiled, before anything is traced: schedule, mesh, functions and settings of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.cluster.axes import KERNEL_AXES, SEQUENCE_AXES
from jaxpipe.errors import CompileError
from jaxpipe.mesh import AXES
from jaxpipe.program.contract import StageFunctions
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Kind, Schedule
from jaxpipe.sharding import Shard


def check_pipeline(
    schedule: Schedule,
    mesh: jax.sharding.Mesh,
    functions: StageFunctions,
    *,
    dtype: Any,
    shard: str,
    behind_layers: bool | None,
) -> None:
    """Raises ScheduleError if the schedule breaks a rule, CompileError if these do not fit together."""
    check_jax()
    _check_dtype(dtype)
    check(schedule)
    _check_actions(schedule, functions)
    _check_shard(shard, behind_layers)
    _check_mesh(schedule, mesh, functions)


def _check_actions(schedule: Schedule, functions: StageFunctions) -> None:
    """Raises CompileError if `schedule` has actions that the program does not run, or not with these functions."""
    if schedule.has_head_actions != bool(functions.over_pipe):
        which = "are not" if schedule.has_head_actions else "are"
        raise CompileError(
            f"embedding and head of the model {which} split over `pipe`, and schedule {schedule.name!r} has "
            f"{'S and T' if schedule.has_head_actions else 'no S and T'}.",
            rule="split-head: a head that is split over `pipe` runs in S and T, another one on the last stage",
            repair="give both, vocabulary(schedule) and functions with `over_pipe`, for example "
            "StageFunctions.of(LanguageModel(config, TensorAxis(num_pipe=...))), or neither",
        )
    if schedule.num_replicas == 1 and schedule.columns.is_kind(Kind.SYNC).any():
        raise CompileError(
            f"schedule {schedule.name!r} of num_replicas=1 has actions of kind SYNC.",
            rule="program-actions: SYNC is between two replicas; gradients are summed over `data` without it",
            repair="leave the SYNCs out",
        )


def check_jax() -> None:
    """Raises CompileError if JAX makes 64-bit numbers by default, in which no round is counted, or compiles nothing."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise CompileError(
            "jax_disable_jit is set.",
            rule="one-program: a step is one compiled program, whose loops and messages do not run one by one",
            repair="unset JAX_DISABLE_JIT, or leave jax.disable_jit(); print from a layer with jax.debug.print",
        )
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise CompileError(
            "jax_enable_x64 is set.",
            rule="numbers-32: the program counts in int32 and computes in float32 or bfloat16",
            repair="unset JAX_ENABLE_X64, or call jax.config.update('jax_enable_x64', False) before",
        )


def _check_dtype(dtype: Any) -> None:
    """Raises CompileError unless compute copies can be of `dtype`: another kind of number has no gradient."""
    try:
        is_float = dtype is None or (jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 4)  # bytes
    except TypeError:
        is_float = False
    if not is_float:
        raise CompileError(
            f"dtype={dtype!r}.",
            rule="compute-dtype: parameters are computed with as floating-point numbers of at most 32 bits",
            repair="give 'bfloat16' or 'float32', or leave dtype out",
        )


def _check_mesh(schedule: Schedule, mesh: jax.sharding.Mesh, functions: StageFunctions) -> None:
    """Raises CompileError unless `mesh` has our axes and the schedule's devices, and kernels are split over it."""
    if tuple(mesh.axis_names) != AXES:
        raise CompileError(
            f"the mesh has axes {tuple(mesh.axis_names)}.",
            rule=f"mesh-axes: a mesh has the axes {AXES}, in this order",
            repair=f"make it with jaxpipe.mesh.make_mesh({', '.join(f'{name}=...' for name in AXES)})",
        )
    num_pipe = mesh.shape["pipe"]
    if num_pipe != schedule.num_devices:
        raise CompileError(
            f"schedule {schedule.name!r} has num_devices={schedule.num_devices}, the mesh has pipe={num_pipe}.",
            rule="pipe-devices: the schedule's devices are the mesh's `pipe` axis",
            repair=f"build the schedule with num_devices={num_pipe}, or a mesh with pipe={schedule.num_devices}",
        )
    num_parts = math.prod(mesh.shape[axis] for axis in SEQUENCE_AXES)
    if num_parts != functions.num_sequence_parts:
        axes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in SEQUENCE_AXES)
        raise CompileError(
            f"the mesh has {axes}, and the functions split a sequence over {functions.num_sequence_parts} devices.",
            rule="sequence-parts: functions for an axis that splits sequences attend to keys of all its devices;"
            " others would add the same gradient once for each of them",
            repair=f"make the functions for this mesh, for example StageFunctions.of(LanguageModel(config, "
            f"TensorAxis.of({', '.join(f'{axis}={mesh.shape[axis]}' for axis in SEQUENCE_AXES)}))), or use 1 device",
        )
    for axis in KERNEL_AXES:
        if mesh.shape[axis] > 1 and functions.specs is None:
            raise CompileError(
                f"the mesh has {axis}={mesh.shape[axis]}, and no parameter is split over it.",
                rule=f"{axis}-axis: functions that use `{axis}` say in `specs` which parameters it splits; without "
                "it all its devices would do the same work",
                repair="make the functions for this mesh, for example StageFunctions.of(LanguageModel(config, "
                f"TensorAxis.of({axis}={mesh.shape[axis]}))), or use {axis}=1",
            )


def _check_shard(shard: str, behind_layers: bool | None) -> None:
    """Raises CompileError unless `shard` is a `Shard` that a program can gather and sum for."""
    if shard not in tuple(Shard):
        raise CompileError(
            f"shard={shard!r}.",
            rule=f"shard-choice: what devices share is one of {', '.join(Shard)}",
            repair=f"give shard={str(Shard.OPTIMIZER)!r}, or another of these",
        )
    if behind_layers is False and Shard(shard).splits_gradients:
        raise CompileError(
            f"shard={str(shard)!r} with behind_layers=False.",
            rule="shard-behind-layers: gradients and weights of which devices keep parts travel behind layers alone",
            repair=f"leave behind_layers out, or give shard={str(Shard.OPTIMIZER)!r}",
        )


def check_kinds(
    schedule: Schedule,
    functions: StageFunctions,
    num_layers: int,
    recomputed: Sequence[int] | None,
    *,
    shard: str,
    behind_layers: bool | None,
) -> None:
    """Raises CompileError for layers of several kinds that their pattern does not name, or that do not compose yet."""
    pattern = functions.pattern
    num_kinds = len(functions.layers)
    named = {*pattern.first, *pattern.unit}
    if not pattern.unit or named != set(range(num_kinds)):
        raise CompileError(
            f"pattern={pattern} of a model with {num_kinds} functions of layers.",
            rule="layer-kinds: a pattern has a unit, and names each kind, 0 for `layer`, 1, ... for `other_layers`",
            repair=f"give for example Pattern(unit={tuple(range(num_kinds))}), which takes the kinds in turn",
        )
    if pattern.only and (len(pattern.only) != num_kinds or set(pattern.kinds(num_layers)) != named):
        raise CompileError(
            f"pattern.only={pattern.only} of a model with {num_kinds} kinds of {num_layers} layers.",
            rule="parameters-of-kinds: `only` has for each kind, which some layer is of, the names of parameters that"
            " others do not have",
            repair=f"give {num_kinds} tuples of names, () for a kind without parameters of its own",
        )
    if num_kinds == 1:
        return
    if pattern.only and (Shard(shard).splits_gradients or behind_layers):
        what = f"shard={str(shard)!r}" if Shard(shard).splits_gradients else "behind_layers=True"
        raise CompileError(
            f"{num_kinds} kinds of layers with other parameters, and {what}.",
            rule="kinds-compose: a layer that travels behind another one has the same parameters",
            repair=f"give shard={str(Shard.OPTIMIZER)!r}, and leave behind_layers out",
        )
    reasons = [
        (schedule.delays, f"schedule {schedule.name!r}, which has no flush", "take one with a flush, as '1f1b'"),
        (schedule.has_pairs, f"schedule {schedule.name!r}, which has pairs", "leave pairs out, or overlap=false"),
        (recomputed and any(recomputed), f"recomputed={tuple(recomputed or ())}", "compute all layers again, or none"),
    ]
    for is_there, what, repair in reasons:
        if is_there:
            raise CompileError(
                f"{num_kinds} kinds of layers with {what}.",
                rule="kinds-compose: layers of several kinds need a flush, forwards and backwards in actions of their"
                " own, and all layers computed again or none",
                repair=repair,
            )


def check_recomputed(
    schedule: Schedule, functions: StageFunctions, layers_per_stage: Sequence[int], recomputed: Sequence[int] | None
) -> tuple[int, ...]:
    """[stage] the layers that are computed again, () if none are; raises CompileError unless stages have as many."""
    counts = tuple(recomputed or ())
    if not any(counts):
        return ()
    if len(counts) != len(layers_per_stage) or any(
        not 0 <= num <= most for num, most in zip(counts, layers_per_stage, strict=False)
    ):
        raise CompileError(
            f"recomputed={counts} for layers_per_stage={tuple(layers_per_stage)}.",
            rule="recomputed-layers: one count a stage, of its first layers, which are no more than it has",
            repair=f"give for example {tuple(min(1, most) for most in layers_per_stage)}",
        )
    if functions.layer_again is None:
        raise CompileError(
            f"recomputed={counts}, and the functions have no `layer_again`.",
            rule="recomputed-layers: `layer_again` is the layer that saves less, for example `jax.checkpoint` of it",
            repair="give StageFunctions(..., layer_again=jax.checkpoint(layer, prevent_cse=False))",
        )
    if schedule.delays and counts != tuple(layers_per_stage):
        raise CompileError(
            f"recomputed={counts} with schedule {schedule.name!r}, which has no flush.",
            rule="recomputed-flush: without flush slots of all stages have one size, so all layers save alike",
            repair="recompute all layers or none, or take a schedule with a flush, for example '1f1b'",
        )
    return counts
