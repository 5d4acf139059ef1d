"""Builds what a checked config describes around a task: devices, pipeline, optimizer and first state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxpipe.checkpoints import restore_params
from jaxpipe.cluster.hardware import known_hardware
from jaxpipe.cluster.topology import Topology
from jaxpipe.config import build_schedule, layers_per_stage, mesh_axes
from jaxpipe.config.base import AUTO
from jaxpipe.config.costs import costs_of_stages
from jaxpipe.config.model import check_attention_kernel
from jaxpipe.config.pipeline import orders_to_try
from jaxpipe.distributed.log import say
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import decide_costs
from jaxpipe.mesh import Devices, choose_devices, key_of, make_mesh, node_by_node, order_devices
from jaxpipe.mesh.jax_defaults import default_promotion
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.without_flush import Stream, one_batch
from jaxpipe.schedules import Costs, Schedule
from jaxpipe.training.by_layer import by_layer
from jaxpipe.training.optimizer import READS_MATRICES, learning_rate, make_optimizer, with_load_bias
from jaxpipe.training.run_folder import path_of
from jaxpipe.training.run_step import Step, StepWithFlush
from jaxpipe.training.step import TrainState, init_state, make_train_step, state_of
from jaxpipe.training.task import Task, Trained, language_model
from jaxpipe.training.without_flush import StepWithoutFlush


@dataclass(frozen=True)
class Setup:
    """The parts that `train` and `eval` build from a config.

    Attributes:
        task: model and batches.
        devices: devices of the mesh, and the reason for this choice.
        schedule: that of the run; without flush it is of several batches.
        pipeline: the pipeline of one batch with a flush.
        costs: expected times of the stages' actions, and of a split head's.
        costs_source: where these are from.
    """

    task: Task
    devices: Devices
    schedule: Schedule
    pipeline: Pipeline
    costs: Costs
    costs_source: str


def set_up(config: ConfigDict, task: Task, *, num_processes: int = 1) -> Setup:
    """Finds the devices of a checked config and builds the pipeline of its task on them.

    Args:
        config: the checked config; its `pipeline.costs` are decided here, for the devices found.
        task: model and batches of the run.
        num_processes: processes that have joined the run.

    Raises:
        ConfigError: devices are missing.
    """
    devices = devices_of(config, num_processes=num_processes)
    # After the devices are chosen, since measured and estimated costs depend on the kind of GPU.
    decided = decide_costs(config, topology_of(devices.devices), task.given)
    # The task was built while "auto" was undecided; a split head needs a model of its own.
    is_split_now = decided.vocab_over_pipe != config.pipeline.vocab_over_pipe and decided.vocab_over_pipe == "true"
    decided.settle(config)
    if is_split_now:
        task = replace(task, model=language_model(config))
    schedule = build_schedule(config)
    pipeline = pipeline_of(config, task.model, devices.devices)
    return Setup(
        task,
        devices=devices,
        schedule=schedule,
        pipeline=pipeline,
        costs=costs_of_stages(config, schedule, pipeline.layers_per_stage),
        costs_source=decided.source,
    )


def devices_of(config: ConfigDict, *, num_processes: int = 1) -> Devices:
    """The devices of the config's mesh; must be called before any other use of JAX.

    Raises:
        ConfigError: devices are missing.
    """
    mesh = config.mesh
    num_devices = math.prod(mesh_axes(config).values())
    return choose_devices(
        num_devices, platform=mesh.platform, deterministic=mesh.deterministic, num_processes=num_processes
    )


def topology_of(devices: Sequence[Any], *, gpus_per_node: int | None = None) -> Topology | None:
    """The nodes and GPUs of `devices`; None if they are no GPUs of a known kind, or stand in nodes of several sizes.

    Args:
        devices: devices of a mesh.
        gpus_per_node: None asks the devices.
    """
    hardware = known_hardware(devices[0].device_kind)
    if hardware is None:
        return None
    with suppress(ConfigError):
        gpus_per_node = gpus_per_node or node_by_node(devices)[1]
        # Rounded up: the last node may not be used whole.
        return Topology(hardware, -(-len(devices) // gpus_per_node), gpus_per_node)
    return None


def dropout_seed(config: ConfigDict, model: Trained) -> int | None:
    """The seed of dropout, folded with the step; None if the model has no dropout."""
    return config.train.seed if model.has_dropout else None


def build_pipeline(
    config: ConfigDict, devices: Sequence[Any], *, gpus_per_node: int | None = None
) -> tuple[LanguageModel, Pipeline]:
    """The model of a checked config and its pipeline on `devices`; arguments and errors are those of `pipeline_of`."""
    model = language_model(config)
    return model, pipeline_of(config, model, devices, gpus_per_node=gpus_per_node)


def pipeline_of(
    config: ConfigDict, model: Trained, devices: Sequence[Any], *, gpus_per_node: int | None = None
) -> Pipeline:
    """The pipeline of a checked config and its `model` on `devices`; of a schedule without flush that of one batch.

    Args:
        config: the checked config.
        model: the functions of the model, for this mesh.
        devices: the mesh's devices in any order; `mesh.order` assigns the stages.
        gpus_per_node: None asks the devices.

    Raises:
        ConfigError: `model.attention` cannot run on these devices, or `mesh.order` cannot lay the mesh on them.
    """
    mesh = config.mesh
    schedule = build_schedule(config)
    # Before the mesh is laid out: its error is about the kind of device, which no order changes.
    _check_attention(config, devices)
    axes = mesh_axes(config)
    devices = mesh_order(config, schedule, devices, gpus_per_node)
    layers = layers_per_stage(config)
    return Pipeline(
        # A schedule without flush has several batches; layout, parts and evaluation are of one.
        one_batch(schedule),
        make_mesh(**axes, devices=devices),
        StageFunctions.of(model),
        num_layers=config.model.num_layers,
        layers_per_stage=layers,
        dtype=config.model.dtype,
        split_masters=config.optimizer.zero1,
        deterministic=mesh.deterministic,
        costs=costs_of_stages(config, schedule, layers),
    )


def optimizer_and_step(
    config: ConfigDict,
    model: Trained,
    pipeline: Pipeline,
    optimizer: optax.GradientTransformation | None = None,
    *,
    schedule: Schedule | None = None,
    num_steps: int | None = None,
) -> tuple[optax.GradientTransformation, Step]:
    """The optimizer, that of the config if none is given, and the train step that applies it.

    Args:
        config: the checked config.
        model: counts the terms of the losses.
        pipeline: of the schedule, or of one batch of it without flush.
        optimizer: None makes that of the config.
        schedule: None builds that of the config.
        num_steps: steps of the run, of which the last one drains the pipeline; None: as in the config.
    """
    schedule = schedule or build_schedule(config)
    # Only the config's own optimizer has a known rate; one given in Python hides it.
    rate = default_promotion()(learning_rate(config)) if optimizer is None else None
    reads_matrices = optimizer is None and config.optimizer.name in READS_MATRICES
    if optimizer:
        # Shapes alone: `by_layer` traces the update, and no parameter is made.
        staged = jax.eval_shape(lambda: _in_float32(pipeline, model.init(key_of(0))))
        made = by_layer(with_load_bias(optimizer, config), staged, has_flush=not schedule.delays)
    else:
        made = make_optimizer(config)
    # Optax is written for JAX's own rules of promotion.
    promoted = default_promotion()
    optimizer = optax.GradientTransformation(promoted(made.init), promoted(made.update))
    fields = {"max_grad_norm": config.optimizer.max_grad_norm, "dropout_seed": dropout_seed(config, model)}
    if schedule.delays:
        stream = Stream(schedule, pipeline, costs=costs_of_stages(config, schedule, pipeline.layers_per_stage))
        more = {"num_steps": num_steps or config.train.steps, "reads_matrices": reads_matrices}
        return optimizer, StepWithoutFlush(model, stream, optimizer, rate, **fields, **more)
    return optimizer, StepWithFlush(pipeline, make_train_step(model, pipeline, optimizer, rate, **fields))


def first_state(config: ConfigDict, setup: Setup, optimizer: optax.GradientTransformation) -> TrainState:
    """The train state before the first step: of `checkpoint.init_from`, of the task's parameters, or of initial ones.

    Raises:
        ConfigError: `checkpoint.init_from` has no checkpoint, or one of another model.
    """
    model = setup.task.model
    pipeline = setup.pipeline
    if config.checkpoint.init_from:
        _, params = restore_params(path_of(config.checkpoint.init_from), model=model, pipeline=pipeline, say=say)
    elif setup.task.params is not None:
        params = _staged(pipeline, setup.task.params)
    else:
        return init_state(model, pipeline, optimizer, seed=config.train.seed)
    return state_of(model, pipeline, optimizer, params)


def _staged(pipeline: Pipeline, params: Any) -> Any:
    """Canonical `params` as float32 on the devices of `pipeline`."""
    stage = partial(_in_float32, pipeline)
    # By the host where they are on several devices, or on others than those of the mesh.
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf) if getattr(leaf, "committed", False) else jnp.asarray(leaf), params
    )
    return jax.jit(stage, out_shardings=pipeline.shardings(jax.eval_shape(stage, params)))(params)


def _in_float32(pipeline: Pipeline, params: Any) -> Any:
    """Staged float32 parameters from canonical ones; traceable."""
    return pipeline.to_stages(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params))


def mesh_order(
    config: ConfigDict, schedule: Schedule, devices: Sequence[Any], gpus_per_node: int | None
) -> tuple[Any, ...]:
    """The devices in the order of the mesh: by `mesh.order`, or the first order of "auto" that can lay out the mesh.

    Args:
        config: the checked config.
        schedule: its schedule.
        devices: all devices of the mesh; node by node if `gpus_per_node` is given.
        gpus_per_node: None asks the devices.

    Raises:
        ConfigError: `mesh.order` cannot lay the mesh on the devices.
    """
    axes = mesh_axes(config)
    # The last order is tried outside of `suppress`, so that its error reaches the user.
    *preferred, last = orders_to_try(schedule) if config.mesh.order == AUTO else (config.mesh.order,)
    for order in preferred:
        with suppress(ConfigError):
            return order_devices(devices, **axes, order=order, gpus_per_node=gpus_per_node)
    return order_devices(devices, **axes, order=last, gpus_per_node=gpus_per_node)


def _check_attention(config: ConfigDict, devices: Sequence[Any]) -> None:
    """Repeats the attention check, now that mesh.platform="auto" is decided."""
    decided = config.copy_and_resolve_references()
    decided.mesh.platform = devices[0].platform
    check_attention_kernel(decided)
