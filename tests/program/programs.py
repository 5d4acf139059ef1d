"""Compiled programs that several tests look at: their gradients, their permutes, what they write, what they hold.

Each is compiled once in a process, so tests that look at the same program stand in one file (`--dist=loadfile`).
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from tiny_models import config_of, pipeline_of, random_batch, random_params
from tiny_training import mean_loss_and_grads

from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.program.shapes import StepShapes
from jaxpipe.schedules import build
from jaxpipe.training.step import mean_factors


class Spec(NamedTuple):
    """A schedule and a tiny model.

    Attributes:
        schedule: name.
        pipe: devices of the pipeline.
        num_microbatches: of a step.
        num_layers: of the model.
        options: of the schedule, as (name, value).
        layers_per_stage: [stage]; None splits them evenly.
        family: of the model.
        data, tensor: devices of the other axes.
        recompute: as in the model's config.
    """

    schedule: str
    pipe: int
    num_microbatches: int
    num_layers: int
    options: tuple[tuple[str, Any], ...] = ()
    family: str = "gpt"
    data: int = 1
    tensor: int = 1
    recompute: str = "none"
    layers_per_stage: tuple[int, ...] | None = None

    def __str__(self) -> str:
        chosen = [f"{name}={self[k]}" for k, name in enumerate(self._fields) if k > 3 and self[k] != Spec(*self[:4])[k]]
        return "-".join([*map(str, self[:4]), *chosen])


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled step and what it is called with.

    Attributes:
        pipeline: of the program.
        params: staged.
        batch: random tokens.
        scale: makes means of the losses.
        shapes: of the step.
        step: the compiled (params, batch, scale) -> (losses, gradients).
    """

    pipeline: Pipeline
    params: Any
    batch: Any
    scale: Any
    shapes: StepShapes
    step: Any

    @functools.cached_property
    def text(self) -> str:
        """The optimized HLO."""
        return self.step.as_text()


@functools.cache
def traced(spec: Spec) -> tuple[Pipeline, tuple[Any, Any, Any], Any]:
    """The pipeline of `spec`, what its step is called with, and the step traced and lowered to StableHLO."""
    schedule = build(spec.schedule, num_devices=spec.pipe, num_microbatches=spec.num_microbatches, **dict(spec.options))
    config = config_of(spec.family, num_layers=spec.num_layers, recompute=spec.recompute)
    pipeline = pipeline_of(schedule, config, data=spec.data, tensor=spec.tensor, layers_per_stage=spec.layers_per_stage)
    params, batch = staged(pipeline, random_params(config)), _batch(spec)
    scale = mean_factors(LanguageModel(config).num_losses(batch))
    arguments = params, batch, scale
    return pipeline, arguments, pipeline.loss_and_grads.lower(*arguments)


@functools.cache
def program(spec: Spec) -> Program:
    """The compiled program of `spec`."""
    pipeline, (params, batch, scale), lowered = traced(spec)
    step = lowered.compile()
    return Program(pipeline, params, batch, scale, pipeline.shapes(params, batch, random=False), step)


@functools.cache
def results(spec: Spec) -> tuple[float, Any]:
    """The loss, all kinds together, and canonical gradients that the program finds."""
    found = program(spec)
    losses, grads = found.step(found.params, found.batch, found.scale)
    return float(sum(jax.tree.leaves(losses))), canonical(found.pipeline, grads)


@functools.cache
def expected(spec: Spec) -> tuple[float, Any]:
    """The same by plain `jax.grad` on one device."""
    config = config_of(spec.family, num_layers=spec.num_layers)
    loss, grads = mean_loss_and_grads(config, random_params(config), _batch(spec))
    return float(loss), grads


def staged(pipeline: Pipeline, params: Any) -> Any:
    """`Pipeline.to_stages` by numpy, which compiles nothing."""
    layer = pipeline.layout.canonical

    def rows(leaf: np.ndarray) -> np.ndarray:
        return np.where((layer < 0).reshape(layer.shape + (1,) * (leaf.ndim - 1)), 0, leaf[layer])

    return {**params, "layers": jax.tree.map(rows, params["layers"])}


def canonical(pipeline: Pipeline, grads: Any) -> Any:
    """`Pipeline.from_stages` by numpy."""
    layer = pipeline.layout.canonical

    def layers(leaf: jax.Array) -> np.ndarray:
        rows = np.asarray(leaf)[layer >= 0]
        return rows[np.argsort(layer[layer >= 0])]

    return {**jax.tree.map(np.asarray, grads), "layers": jax.tree.map(layers, grads["layers"])}


def _batch(spec: Spec) -> dict[str, np.ndarray]:
    return random_batch(spec.num_microbatches, seed=0, family="bert" if spec.family == "bert" else "gpt")
