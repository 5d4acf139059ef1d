"""A tiny GPT, a batch for it, and its gradients by plain `jax.grad`, without a pipeline.

Everything is float32, so both sides round: one operation errs by eps = 2^-24 = 6e-8 relative to its
result, and both sum the same terms in another order (over microbatches, over the data axis, within
matrix products). A gradient here is a sum of up to 32 x 2 x 8 = 512 tokens' terms, behind up to 40 layers
of about a dozen roundings each: eps x sqrt(512 + 480) = 1.9e-6 if roundings are independent. The bound
of 1e-5 leaves room for cancellation, and is far below what a wrong page, microbatch or layer does.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import pipeline_of, random_params, relative_errors

from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.schedules import Schedule

MICROBATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 2, 8, 32
MOST_LAYERS, MOST_MICROBATCHES = 64, 32
LARGEST_ERROR = 1e-5


@functools.cache
def make_config(tie_embeddings: bool = True) -> GPTConfig:
    """One config for all numbers of layers: the model's functions do not depend on them."""
    return GPTConfig(
        num_layers=MOST_LAYERS,
        hidden=16,
        num_heads=2,
        vocab_size=VOCAB_SIZE,
        num_positions=SEQ_LEN,
        tie_embeddings=tie_embeddings,
    )


def make_model(tie_embeddings: bool = True) -> LanguageModel:
    return LanguageModel(make_config(tie_embeddings))


def make_params(num_layers: int, *, tie_embeddings: bool = True):
    params = random_params(make_config(tie_embeddings))
    return {**params, "layers": jax.tree.map(lambda leaf: leaf[:num_layers], params["layers"])}


def make_batch(num_microbatches: int) -> dict[str, np.ndarray]:
    """The first of always the same microbatches; a fifth of the targets and all of one sequence are not valid."""
    generator = np.random.default_rng(1)
    shape = (MOST_MICROBATCHES, MICROBATCH_SIZE, SEQ_LEN + 1)
    tokens = generator.integers(VOCAB_SIZE, size=shape, dtype=np.int32)
    targets = np.where(generator.random(shape) < 0.2, -1, tokens)[..., 1:]
    targets[2, 0] = -1
    return {"tokens": tokens[:num_microbatches, :, :-1], "targets": targets[:num_microbatches]}


def make_pipeline(
    schedule: Schedule,
    *,
    num_layers: int,
    tie_embeddings: bool = True,
    layers_per_stage: tuple[int, ...] | None = None,
    **options: Any,
) -> Pipeline:
    config = make_config(tie_embeddings)
    return pipeline_of(schedule, config, num_layers=num_layers, layers_per_stage=layers_per_stage, **options)


def loss_and_grads(pipeline: Pipeline, *, tie_embeddings: bool = True):
    """The pipeline's loss and its gradients in canonical layer order, a mean over the valid tokens."""
    batch = make_batch(pipeline.schedule.num_microbatches)
    params = make_params(pipeline.layout.num_layers, tie_embeddings=tie_embeddings)
    staged = jax.jit(pipeline.to_stages)(params)
    loss, grads = pipeline.loss_and_grads(staged, batch, 1 / num_valid(batch))
    return float(loss), jax.jit(pipeline.from_stages)(grads)


def num_valid(batch) -> int:
    return int((batch["targets"] >= 0).sum())


def expected_loss_and_grads(num_layers: int, num_microbatches: int, *, tie_embeddings: bool = True):
    """The same by plain `jax.grad` of the model in float32, one microbatch at a time, added up in float64."""
    scale = 1 / num_valid(make_batch(num_microbatches))
    each = [_of_microbatch(m, num_layers, tie_embeddings) for m in range(num_microbatches)]
    return jax.tree.map(lambda *leaves: scale * sum(np.asarray(leaf, np.float64) for leaf in leaves), *each)


@functools.cache
def _value_and_grad(tie_embeddings: bool):
    return jax.jit(jax.value_and_grad(make_model(tie_embeddings).loss_sum))


@functools.cache
def _of_microbatch(microbatch: int, num_layers: int, tie_embeddings: bool):
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf[microbatch]), make_batch(MOST_MICROBATCHES))
    return _value_and_grad(tie_embeddings)(make_params(num_layers, tie_embeddings=tie_embeddings), batch)


def assert_equivalent(pipeline: Pipeline, *, tie_embeddings: bool = True) -> None:
    num_layers, num_microbatches = pipeline.layout.num_layers, pipeline.schedule.num_microbatches
    loss, grads = loss_and_grads(pipeline, tie_embeddings=tie_embeddings)
    expected_loss, expected_grads = expected_loss_and_grads(num_layers, num_microbatches, tie_embeddings=tie_embeddings)
    assert loss == pytest.approx(float(expected_loss), rel=LARGEST_ERROR)
    # No leaf is exactly zero in truth, so every error is relative. A part of one is: adding a vector to all keys
    # shifts a query's scores alike and changes no probability, so the middle third of query_key_value's bias has
    # gradient zero. Its rounding noise is compared with the whole bias, as an error relative to zero means nothing.
    errors = relative_errors(grads, expected_grads)
    assert max(errors.values()) <= LARGEST_ERROR, errors
