"""Three stages on one device, in the compiled program itself; any subset of their actions can run.

The first stage has the embedding, the last one the head, and the middle one only layers. All forwards precede all
backwards, so that residuals stay in pages for a while, as in a pipeline. An action that does not run is an idle round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpipe.config import model_config
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import Schedule
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.schedule import Action, Kind
from jaxpipe.training.batches import example_batch, put_batch
from jaxpipe.training.setup import dropout_seed
from jaxpipe.training.step import mean_factors

NUM_STAGES = 3
NUM_MICROBATCHES = 4
PyTree = Any


@dataclass(frozen=True)
class Stages:
    """Three stages as pipelines with whole and with split backwards, ready to time.

    Attributes:
        config: the config of the three stages.
        model: the model as each device computes it.
        whole: the pipeline whose backwards are in one part.
        halves: the pipeline whose backwards are in two.
        params, batch: parameters and batch for both pipelines.
        num_layers: layers of each stage.
    """

    config: ConfigDict
    model: LanguageModel
    whole: Pipeline
    halves: Pipeline
    params: PyTree
    batch: PyTree
    num_layers: int

    def compile_some(self, pipeline: Pipeline) -> Callable[[np.ndarray], Any]:
        """Compiles one of the two pipelines: mask of the actions to run, "round device" -> their results."""
        seed = dropout_seed(self.config, self.model)
        key = None if seed is None else jax.random.key(seed)
        scale = jax.tree.map(np.float32, mean_factors(self.model.num_losses(self.batch)))
        arguments = (self.params, self.batch, scale, key)
        compiled = pipeline.run_subset.lower(no_actions(pipeline), *arguments).compile()
        return lambda is_run: compiled(is_run, *arguments)


def make_stages(config: ConfigDict, devices: Sequence[Any], *, microbatch_size: int, num_layers: int) -> Stages:
    """The three stages of a checked config's model.

    Args:
        config: a checked config; its model, data, optimizer and `mesh.tensor` are used.
        devices: `mesh.tensor` devices.
        microbatch_size: sequences of a microbatch.
        num_layers: layers of each stage.
    """
    config = config.copy_and_resolve_references()
    config.model.num_layers = NUM_STAGES * num_layers
    config.data.batch_size = microbatch_size * NUM_MICROBATCHES
    config.pipeline.num_microbatches = NUM_MICROBATCHES
    config.mesh.update(data=1, pipe=1)
    tensor = config.mesh.tensor
    model = LanguageModel(model_config(config), TensorAxis(tensor, config.mesh.deterministic))

    def pipeline(*, by_halves: bool) -> Pipeline:
        return Pipeline(
            three_stages(NUM_MICROBATCHES, by_halves=by_halves),
            make_mesh(tensor=tensor, devices=devices),
            StageFunctions.of(model),
            num_layers=config.model.num_layers,
            layers_per_stage=(num_layers,) * NUM_STAGES,
            dtype=config.model.dtype,
            deterministic=config.mesh.deterministic,
        )

    whole, halves = pipeline(by_halves=False), pipeline(by_halves=True)
    staged = partial(_staged_params, model, whole)
    params = jax.jit(staged, out_shardings=whole.shardings(jax.eval_shape(staged)))()
    return Stages(config, model, whole, halves, params, put_batch(whole, example_batch(config)), num_layers)


def three_stages(num_microbatches: int, *, by_halves: bool) -> Schedule:
    """Three stages on one device: all forwards, then all backwards, microbatch by microbatch.

    N=1: 0F0 1F0 2F0 2B0 1B0 0B0.
    """
    microbatches, stages = range(num_microbatches), range(NUM_STAGES)
    kinds = (Kind.I, Kind.W) if by_halves else (Kind.B,)
    forwards = [Action(Kind.F, stage, m) for m in microbatches for stage in stages]
    backwards = [Action(kind, stage, m) for m in microbatches for stage in reversed(stages) for kind in kinds]
    return Schedule("three_stages", looped(1, NUM_STAGES), num_microbatches, ((*forwards, *backwards),))


def no_actions(pipeline: Pipeline) -> np.ndarray:
    """The mask, "round device", under which no action runs."""
    return np.zeros(pipeline.table.kind.shape, bool)


def some_actions(pipeline: Pipeline, stage: int, kinds: Sequence[Kind]) -> np.ndarray:
    """The mask, "round device", under which the actions of `kinds` of one stage run."""
    return np.isin(pipeline.table.kind, kinds) & (pipeline.table.stage == stage)


def _staged_params(model: LanguageModel, pipeline: Pipeline) -> PyTree:
    return pipeline.to_stages(model.init(jax.random.key(0)))
