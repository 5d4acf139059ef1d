"""A tiny BERT in a pipeline has the losses and gradients of plain `jax.grad`; the bound is that of `tiny_gpt`."""

from typing import Any

import jax
import pytest
from tiny_gpt import LARGEST_ERROR
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors
from tiny_training import mean_loss_and_grads

from jaxpipe.models import LanguageModel
from jaxpipe.schedules import Schedule
from jaxpipe.training.step import mean_factors


def assert_equivalent(schedule: Schedule, *, num_layers: int, tie_embeddings: bool, **options: Any) -> None:
    config = config_of("bert", num_layers=num_layers, tie_embeddings=tie_embeddings)
    pipeline = pipeline_of(schedule, config, **options)
    params, batch = random_params(config), random_batch(schedule.num_microbatches, seed=0, family="bert")
    scale = mean_factors(LanguageModel(config).num_losses(batch))
    losses, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch, scale)
    wanted, wanted_grads = mean_loss_and_grads(config, params, batch)
    assert set(losses) == {"masked_lm", "sentence_order"}
    assert float(sum(losses.values())) == pytest.approx(float(wanted), rel=LARGEST_ERROR)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted_grads)
    assert max(errors.values()) <= LARGEST_ERROR, errors
