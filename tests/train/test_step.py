"""The train step around the pipeline: clipping, metrics, the key of each step; the eval step drops nothing."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
from jaxpipe.training.step import TrainState, make_eval_step, make_train_step

NUM_MICROBATCHES, NUM_LAYERS = 3, 2
SIZES: dict[str, Any] = {"num_layers": NUM_LAYERS, "hidden": 16, "num_heads": 2, "vocab_size": 32, "num_positions": 8}
DROPS: dict[str, Any] = {"embedding_dropout": 0.2, "attention_dropout": 0.2, "hidden_dropout": 0.2}
# Its state is the gradient as it was given, so that a test can look at it.
GIVEN = optax.trace(decay=0.0)
norm_of = jax.jit(optax.tree.norm)


def _pipeline(model: LanguageModel, **axes: Any) -> Pipeline:
    schedule = build("1f1b", num_devices=2, num_microbatches=NUM_MICROBATCHES)
    return Pipeline(schedule, make_mesh(pipe=2, **axes), StageFunctions.of(model), num_layers=NUM_LAYERS)


@cache
def _plain(num_devices: int) -> Pipeline:
    """Without dropout, on a mesh of 2 devices, or of 8, where parameters are split in every way that there is."""
    axes = {"data": 2, "tensor": 2} if num_devices == 8 else {}
    return _pipeline(LanguageModel(GPTConfig(**SIZES), TensorAxis(axes.get("tensor", 1))), **axes)


@cache
def _dropping() -> Pipeline:
    return _pipeline(LanguageModel(GPTConfig(**SIZES, **DROPS)))


@cache
def _canonical():
    return jax.jit(LanguageModel(GPTConfig(**SIZES)).init)(jax.random.key(0))


def _params(pipeline: Pipeline):
    staged = pipeline.to_stages(jax.tree.map(np.asarray, _canonical()))
    return jax.device_put(staged, pipeline.shardings(staged))


def _batch(pipeline: Pipeline):
    generator = np.random.default_rng(0)
    tokens = generator.integers(32, size=(NUM_MICROBATCHES, 4, 9), dtype=np.int32)
    targets = np.where(generator.random(tokens.shape) < 0.2, -1, tokens)[..., 1:]
    return jax.device_put({"tokens": tokens[..., :-1], "targets": targets}, pipeline.batch_sharding)


def _steps(pipeline: Pipeline, num_steps: int, *, max_grad_norm: float, dropout_seed: int | None = None):
    """The gradients and the metrics of each step, all from the first parameters: only their number is new."""
    train_step = make_train_step(
        LanguageModel(GPTConfig(**SIZES)),
        pipeline,
        GIVEN,
        lambda step: 0.1 / (step + 1),
        max_grad_norm=max_grad_norm,
        dropout_seed=dropout_seed,
    )
    batch, init = _batch(pipeline), jax.jit(GIVEN.init)

    def state(step: int) -> TrainState:
        params = _params(pipeline)
        return TrainState(params, init(params), jnp.int32(step), jnp.int32(0), jnp.int32(0))

    compiled = train_step.lower(state(0), batch).compile()
    after = [compiled(state(step), batch) for step in range(num_steps)]
    assert [int(new.step) for new, _ in after] == list(range(1, num_steps + 1))
    return [
        (pipeline.from_stages(jax.tree.map(np.asarray, new.optimizer.trace)), jax.tree.map(float, metrics))
        for new, metrics in after
    ]


@cache
def _plain_loss_and_gradient():
    """The mean over the valid tokens, and its gradient in canonical layer order, by plain `jax.grad`."""
    model, batch = LanguageModel(GPTConfig(**SIZES)), jax.tree.map(np.asarray, _batch(_plain(2)))

    def mean(params):
        return jax.vmap(model.loss_sum, (None, 0))(params, batch).sum() / (batch["targets"] >= 0).sum()

    return jax.jit(jax.value_and_grad(mean))(_canonical())


@pytest.mark.parametrize(
    ("share", "num_devices"),
    [
        pytest.param(0.3, 2, id="larger than allowed", marks=pytest.mark.ci),
        pytest.param(3.0, 2, id="smaller than allowed", marks=pytest.mark.slow),
        pytest.param(0.3, 8, id="larger, on all axes", marks=pytest.mark.slow),
        pytest.param(3.0, 8, id="smaller, on all axes", marks=pytest.mark.slow),
    ],
)
def test_gradients_are_clipped_as_optax_does_it(share, num_devices):
    _, gradient = _plain_loss_and_gradient()
    norm = float(norm_of(gradient))
    clip = optax.clip_by_global_norm(share * norm)
    expected, _ = jax.jit(clip.update)(gradient, clip.init(gradient))
    ((found, metrics),) = _steps(_plain(num_devices), 1, max_grad_norm=share * norm)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert float(norm_of(found)) == pytest.approx(min(share, 1.0) * norm, rel=1e-5)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # float32 sums of some hundred terms in another order.
        assert np.linalg.norm(leaf - wanted) <= 1e-5 * np.linalg.norm(wanted)


@pytest.mark.slow
def test_each_step_has_its_learning_rate_and_drops_others():
    (_, first), (_, second) = _steps(_dropping(), 2, max_grad_norm=1.0, dropout_seed=7)
    assert [first["learning_rate"], second["learning_rate"]] == pytest.approx([0.1, 0.05])
    plain, _ = _plain_loss_and_gradient()
    losses = [first["loss"], second["loss"], float(plain)]
    # Rounding moves a loss by 1e-6 of itself, a mask by far more.
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-4
    assert losses == pytest.approx([float(plain)] * 3, rel=0.2)


def test_the_eval_step_drops_nothing():
    pipeline = _dropping()
    batch = _batch(pipeline)
    total = make_eval_step(pipeline)(_params(pipeline), batch)
    plain, _ = _plain_loss_and_gradient()
    assert float(total) / int((batch["targets"] >= 0).sum()) == pytest.approx(float(plain), rel=1e-5)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_square_sums_are_those_of_every_leaf_in_order(is_deterministic):
    pipeline = _pipeline(LanguageModel(GPTConfig(**SIZES), TensorAxis(2)), data=2, tensor=2)
    pipeline.deterministic = is_deterministic
    params = _params(pipeline)
    expected = [np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(_canonical())]
    assert len(set(expected)) > 5
    found = jax.jit(pipeline.square_sums)(params)
    assert np.asarray(found) == pytest.approx(expected, rel=1e-5)
