"""Builds what a checked config describes around a task: devices, pipeline, optimizer and first state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.checkpoints import restore_params
from jaxpipe.cluster.hardware import known_hardware
from jaxpipe.cluster.topology import Topology
from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.model import check_attention_kernel
from jaxpipe.config.pipeline import orders_to_try
from jaxpipe.config.run_spec import RunSpec
from jaxpipe.distributed.log import say
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import resolve
from jaxpipe.mesh import Devices, choose_devices, key_of, make_mesh, node_by_node, order_devices
from jaxpipe.mesh.jax_defaults import default_promotion
from jaxpipe.models import LanguageModel
from jaxpipe.models.given import recomputed
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.without_flush import Stream, one_batch
from jaxpipe.schedules import Schedule
from jaxpipe.training.batches import read_corpus
from jaxpipe.training.by_layer import by_layer
from jaxpipe.training.given import NOTHING_GIVEN, Given
from jaxpipe.training.optimizer import learning_rate, make_optimizer, with_average, with_load_bias
from jaxpipe.training.run_folder import path_of
from jaxpipe.training.run_step import Step, StepWithFlush
from jaxpipe.training.step import TrainState, init_state, initial_trained, make_train_step, state_of
from jaxpipe.training.task import Task, Trained, language_model, task_of
from jaxpipe.training.without_flush import StepWithoutFlush


@dataclass(frozen=True)
class Setup:
    """The parts that `train` and `eval` build from a config.

    Attributes:
        devices: devices of the mesh, and the reason for this choice.
        pipeline: the pipeline of one batch with a flush.
    """

    spec: RunSpec
    task: Task
    devices: Devices
    pipeline: Pipeline


def set_up(
    config: RunConfig, task: Task | None = None, *, given: Given = NOTHING_GIVEN, num_processes: int = 1
) -> Setup:
    """Finds the devices of a checked config, decides what it leaves open and builds the pipeline of its task.

    Args:
        task: model and batches of the run; None: those of the config.
        given: without `task`, a loss and batches of one's own.
        num_processes: processes that have joined the run.

    Raises:
        ConfigError: devices are missing, or as `task_of`.
    """
    # The text is read before any device is asked for: it is quick and may fail.
    has_batches = task is not None or given.train_batches is not None
    corpus = None if has_batches else read_corpus(config)
    devices = devices_of(config, num_processes=num_processes)
    # Measured and estimated costs depend on the kind of GPU.
    told = {"given": task and task.given, "weighs_tokens": given.loss is not None}
    spec = resolve(config, topology_of(devices.devices), platform=devices.platform, **told)
    task = task or (task_of(spec.config, corpus, loss=given.loss) if corpus else given.task(spec.config))
    return Setup(spec, task, devices, pipeline_of(spec, task.model, devices.devices))


def devices_of(config: RunConfig, *, num_processes: int = 1) -> Devices:
    """The devices of the config's mesh; must be called before any other use of JAX.

    Raises:
        ConfigError: devices are missing.
    """
    mesh = RunConfig.of(config).mesh
    return choose_devices(
        mesh.num_devices, platform=mesh.platform, deterministic=mesh.deterministic, num_processes=num_processes
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


def dropout_seed(config: RunConfig, model: Trained) -> int | None:
    """The seed of dropout, folded with the step; None if the model has no dropout."""
    return config.train.seed if model.has_dropout else None


def build_pipeline(
    spec: RunSpec, devices: Sequence[Any], *, gpus_per_node: int | None = None
) -> tuple[LanguageModel, Pipeline]:
    """The model of a run and its pipeline on `devices`; arguments and errors are those of `pipeline_of`."""
    model = language_model(spec.config)
    return model, pipeline_of(spec, model, devices, gpus_per_node=gpus_per_node)


def pipeline_of(spec: RunSpec, model: Trained, devices: Sequence[Any], *, gpus_per_node: int | None = None) -> Pipeline:
    """The pipeline of a run and its `model` on `devices`; of a schedule without flush that of one batch.

    Args:
        model: the functions of the model, for this mesh.
        devices: the mesh's devices in any order; `mesh.order` assigns the stages.
        gpus_per_node: None asks the devices.

    Raises:
        ConfigError: `model.attention` cannot run on these devices, or `mesh.order` cannot lay the mesh on them.
    """
    config = spec.config
    # Again, now that the platform is decided; before the mesh is laid out, since no order changes the kind of device.
    check_attention_kernel(config.replaced({"mesh.platform": devices[0].platform}))
    _, devices = mesh_order(spec, devices, gpus_per_node)
    functions = StageFunctions.of(model)
    again = spec.recomputed
    if again:
        functions = replace(functions, layer_again=_layer_again(model, again.kind))
    return Pipeline(
        # A schedule without flush has several batches; layout, parts and evaluation are of one.
        one_batch(spec.schedule),
        make_mesh(**config.mesh.axes, devices=devices),
        functions,
        num_layers=config.model.num_layers,
        layers_per_stage=spec.layers_per_stage,
        dtype=config.model.dtype,
        shard=config.mesh.shard,
        kept=spec.kept,
        sums_dtype=config.mesh.sums_dtype,
        deterministic=config.mesh.deterministic,
        costs=spec.stage_costs,
        recomputed=again and again.counts,
    )


def _layer_again(model: Trained, kind: str) -> Callable[..., Any]:
    """The layer of `model` that backward computes again as `kind` says, a value of `model.recompute`."""
    if isinstance(model, LanguageModel):
        return replace(model, config=replace(model.config, recompute=kind)).layer
    return recomputed(StageFunctions.of(model).layer, kind)


def optimizer_and_step(
    spec: RunSpec,
    model: Trained,
    pipeline: Pipeline,
    optimizer: optax.GradientTransformation | None = None,
    *,
    schedule: Schedule | None = None,
    num_steps: int | None = None,
) -> tuple[optax.GradientTransformation, Step]:
    """The optimizer, that of the config if none is given, and the train step that applies it.

    Args:
        pipeline: of the schedule, or of one batch of it without flush.
        num_steps: steps of the run, of which the last one drains the pipeline; None: as in the config.
    """
    config = spec.config
    schedule = schedule or spec.schedule
    # Only the config's own optimizer has a known rate; one given in Python hides it.
    rate = default_promotion()(learning_rate(config)) if optimizer is None else None
    reads_matrices = optimizer is None and spec.optimizer.reads_matrices
    # Shapes alone: no parameter is made.
    params = jax.eval_shape(lambda: model.init(key_of(0)))
    if optimizer:
        staged = pipeline.trained(jax.eval_shape(partial(_staged_masters, pipeline), params))
        made = by_layer(with_load_bias(optimizer, config), staged, has_flush=not schedule.delays)
    else:
        made = make_optimizer(config, params)
    made = with_average(made, config.optimizer.average_decay)
    # Optax is written for JAX's own rules of promotion.
    promoted = default_promotion()
    optimizer = optax.GradientTransformation(promoted(made.init), promoted(made.update))
    fields = {"max_grad_norm": config.optimizer.max_grad_norm, "dropout_seed": dropout_seed(config, model)}
    if schedule.delays:
        stream = Stream(schedule, pipeline, costs=spec.stage_costs)
        more = {"num_steps": num_steps or config.train.steps, "reads_matrices": reads_matrices}
        return optimizer, StepWithoutFlush(model, stream, optimizer, rate, **fields, **more)
    return optimizer, StepWithFlush(pipeline, make_train_step(model, pipeline, optimizer, rate, **fields))


def first_state(setup: Setup, optimizer: optax.GradientTransformation) -> TrainState:
    """The train state before the first step: of `checkpoint.init_from`, of the task's parameters, or of initial ones.

    Raises:
        ConfigError: `checkpoint.init_from` has no checkpoint, or one of another model.
    """
    config = setup.spec.config
    model = setup.task.model
    pipeline = setup.pipeline
    if config.checkpoint.init_from:
        adapters = partial(initial_trained, model, pipeline, seed=config.train.seed)
        _, params = restore_params(
            path_of(config.checkpoint.init_from), model=model, pipeline=pipeline, adapters=adapters, say=say
        )
    elif setup.task.params is not None:
        params = _staged(pipeline, setup.task.params)
    else:
        return init_state(model, pipeline, optimizer, seed=config.train.seed)
    return state_of(model, pipeline, optimizer, params)


def _staged(pipeline: Pipeline, params: Any) -> Any:
    """Canonical `params` as masters on the devices of `pipeline`."""
    stage = partial(_staged_masters, pipeline)
    # By the host where they are on several devices, or on others than those of the mesh.
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf) if getattr(leaf, "committed", False) else jnp.asarray(leaf), params
    )
    return jax.jit(stage, out_shardings=pipeline.shardings(jax.eval_shape(stage, params)))(params)


def _staged_masters(pipeline: Pipeline, params: Any) -> Any:
    """Staged masters from canonical parameters; traceable."""
    return pipeline.to_stages(pipeline.masters(params))


def mesh_order(spec: RunSpec, devices: Sequence[Any], gpus_per_node: int | None) -> tuple[str, tuple[Any, ...]]:
    """The order of the mesh and the devices in it: `mesh.order`, or the first one of "auto" that can lay out the mesh.

    Args:
        devices: all devices of the mesh; node by node if `gpus_per_node` is given.
        gpus_per_node: None asks the devices.

    Raises:
        ConfigError: `mesh.order` cannot lay the mesh on the devices.
    """
    mesh = spec.config.mesh
    # The last order is tried outside of `suppress`, so that its error reaches the user.
    *preferred, last = orders_to_try(spec.schedule) if mesh.order == AUTO else (mesh.order,)
    for order in preferred:
        with suppress(ConfigError):
            return order, order_devices(devices, **mesh.axes, order=order, gpus_per_node=gpus_per_node)
    return last, order_devices(devices, **mesh.axes, order=last, gpus_per_node=gpus_per_node)
