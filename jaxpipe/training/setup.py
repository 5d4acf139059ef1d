"""What a config asks for, built: devices and mesh, text, model and pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from ml_collections import ConfigDict

from jaxpipe.config import build_schedule, expected_costs, layers_per_stage, model_config
from jaxpipe.config.base import AUTO
from jaxpipe.config.mesh_order import orders_to_try
from jaxpipe.config.model import check_attention_kernel
from jaxpipe.data import Batch, Batches, Corpus
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import Devices, TensorAxis, choose_devices, make_mesh, order_devices
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import Costs
from jaxpipe.training.optimizer import learning_rate, make_optimizer
from jaxpipe.training.step import make_train_step
from jaxpipe.training.text import batches_of, read_corpus


@dataclass(frozen=True)
class Setup:
    """What train and eval both need.

    Attributes:
        corpus: training and held-out tokens.
        train_batches: of the training tokens.
        heldout_batches: of the held-out tokens.
        devices: what the mesh is made of, and why.
        model: the model's functions, for the mesh's `tensor` axis.
        pipeline: the compiled program's maker.
        costs: what a stage's actions are expected to take.
    """

    corpus: Corpus
    train_batches: Batches
    heldout_batches: Batches
    devices: Devices
    model: LanguageModel
    pipeline: Pipeline
    costs: Costs


def set_up(config: ConfigDict, *, num_processes: int = 1) -> Setup:
    """Builds what a checked config asks for; reads the text first, since that can fail and is quick.

    Args:
        config: checked.
        num_processes: that have joined.

    Raises:
        ConfigError: files or devices that are not there.
    """
    corpus = read_corpus(config)
    devices = devices_of(config, num_processes=num_processes)
    model, pipeline = build_pipeline(config, devices.devices)
    return Setup(
        corpus,
        train_batches=batches_of(config, corpus.train),
        heldout_batches=batches_of(config, corpus.heldout),
        devices=devices,
        model=model,
        pipeline=pipeline,
        costs=expected_costs(config),
    )


def devices_of(config: ConfigDict, *, num_processes: int = 1) -> Devices:
    """The devices of the config's mesh; before any other use of jax.

    Raises:
        ConfigError: devices that are not there.
    """
    mesh = config.mesh
    num_devices = mesh.data * mesh.pipe * mesh.tensor
    return choose_devices(
        num_devices, platform=mesh.platform, deterministic=mesh.deterministic, num_processes=num_processes
    )


def dropout_seed(config: ConfigDict, model: LanguageModel) -> int | None:
    """What decides, with the step, what training drops; None where the model drops nothing."""
    return config.train.seed if model.config.anatomy.has_dropout else None


def build_pipeline(
    config: ConfigDict, devices: Sequence[Any], *, gpus_per_node: int | None = None
) -> tuple[LanguageModel, Pipeline]:
    """The model of a checked config and its pipeline on `devices`, data x pipe x tensor of them.

    Args:
        config: checked.
        devices: as they come; `mesh.order` says which takes which stage.
        gpus_per_node: None asks the devices.

    Raises:
        ConfigError: `model.attention` cannot run on these devices, or `mesh.order` cannot lay the mesh on them.
    """
    mesh, schedule = config.mesh, build_schedule(config)
    _check_attention(config, devices)
    axes = {"data": mesh.data, "pipe": mesh.pipe, "tensor": mesh.tensor}
    orders = orders_to_try(schedule) if mesh.order == AUTO else (mesh.order,)
    devices = _in_first_order(devices, axes, orders, gpus_per_node)
    model = LanguageModel(model_config(config), TensorAxis(mesh.tensor, mesh.deterministic))
    layers = layers_per_stage(config)
    pipeline = Pipeline(
        schedule,
        make_mesh(**axes, devices=devices),
        StageFunctions.of(model),
        num_layers=config.model.num_layers,
        layers_per_stage=layers,
        dtype=config.model.dtype,
        split_masters=config.optimizer.zero1,
        deterministic=mesh.deterministic,
        costs=expected_costs(config).of_layers(layers),
    )
    return model, pipeline


def optimizer_and_step(
    config: ConfigDict, model: LanguageModel, pipeline: Pipeline
) -> tuple[optax.GradientTransformation, Any]:
    """The optimizer of a config, and the jitted train step that applies it."""
    optimizer = make_optimizer(config)
    step = make_train_step(
        model,
        pipeline,
        optimizer,
        learning_rate(config),
        max_grad_norm=config.optimizer.max_grad_norm,
        dropout_seed=dropout_seed(config, model),
    )
    return optimizer, step


def _in_first_order(
    devices: Sequence[Any], axes: dict[str, int], orders: Sequence[str], gpus_per_node: int | None
) -> tuple[Any, ...]:
    """`devices` in the first of `orders` that takes this mesh."""
    *preferred, last = orders
    for order in preferred:
        with suppress(ConfigError):
            return order_devices(devices, **axes, order=order, gpus_per_node=gpus_per_node)
    return order_devices(devices, **axes, order=last, gpus_per_node=gpus_per_node)


def _check_attention(config: ConfigDict, devices: Sequence[Any]) -> None:
    """The check of the config again, now that mesh.platform="auto" has been decided."""
    decided = config.copy_and_resolve_references()
    decided.mesh.platform = devices[0].platform
    check_attention_kernel(decided)


def local_rows(pipeline: Pipeline, microbatch_size: int) -> np.ndarray:
    """Which rows of every microbatch the devices of this process hold, in ascending order: "row".

    They are all rows where devices of every index of `data` are among them, as where the pipe axis spans processes.
    """
    indices = pipeline.batch_sharding.addressable_devices_indices_map((1, microbatch_size)).values()
    return np.unique([np.arange(microbatch_size)[index[1]] for index in indices if index is not None])


def put_batch(pipeline: Pipeline, batch: Batch, rows: np.ndarray | None = None) -> dict[str, jax.Array]:
    """`batch` on the devices of all processes, as the pipeline wants it.

    Args:
        pipeline: of the mesh.
        batch: leaves "num_microbatches row ...", the same numbers in every process that holds a row.
        rows: those of `local_rows` where `batch` has no others; None where it has all.
    """
    num_data = pipeline.mesh.shape["data"]

    def put(leaf: np.ndarray) -> jax.Array:
        num_microbatches, num_rows, *rest = leaf.shape
        if rows is not None:
            num_rows = num_rows * num_data // len(local_rows(pipeline, num_data))

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # asked for devices of this process alone
            start, stop, _ = index[1].indices(num_rows)
            begin = start if rows is None else int(np.searchsorted(rows, start))
            return leaf[:, begin : begin + stop - start]

        return jax.make_array_from_callback((num_microbatches, num_rows, *rest), pipeline.batch_sharding, shard)

    return {name: put(leaf) for name, leaf in batch.items()}
