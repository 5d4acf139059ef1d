"""The train state and the functions that make, change and evaluate it, each one jitted program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.training.losses import factors, named


@partial(jax.tree_util.register_dataclass, data_fields=["params", "optimizer", "step"], meta_fields=[])
@dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    Attributes:
        params: staged parameters, float32.
        optimizer: the optimizer's state, sharded as the parameters.
        step: steps done, int32.
    """

    params: Any
    optimizer: Any
    step: Any


def init_state(
    model: LanguageModel, pipeline: Pipeline, optimizer: optax.GradientTransformation, *, seed: int
) -> TrainState:
    """The state before the first step, made where it will live; the same for every mesh and schedule."""
    make = jax.jit(
        partial(_init, model, pipeline, optimizer), out_shardings=_shardings(state_like(model, pipeline, optimizer))
    )
    return make(jax.random.key(seed))


def state_of(
    model: LanguageModel, pipeline: Pipeline, optimizer: optax.GradientTransformation, params: Any
) -> TrainState:
    """The state before the first step of a run that starts from staged `params`, which are donated."""
    shardings = _shardings(state_like(model, pipeline, optimizer))
    return jax.jit(partial(_before_first_step, optimizer), out_shardings=shardings, donate_argnums=0)(params)


def state_like(model: LanguageModel, pipeline: Pipeline, optimizer: optax.GradientTransformation) -> TrainState:
    """Shapes, dtypes and shardings of the train state, of which nothing is made."""
    shapes = jax.eval_shape(partial(_init, model, pipeline, optimizer), jax.random.key(0))
    params = pipeline.shardings(shapes.params)
    replicated = NamedSharding(pipeline.mesh, P())
    moments = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        shapes.optimizer,
        params,
        transform_non_params=lambda _: replicated,
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        TrainState(params, moments, replicated),
    )


def _init(
    model: LanguageModel, pipeline: Pipeline, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    return _before_first_step(optimizer, pipeline.to_stages(model.init(key)))


def _before_first_step(optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def make_train_step(
    model: LanguageModel,
    pipeline: Pipeline,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule,
    *,
    max_grad_norm: float,
    dropout_seed: int | None = None,
) -> Any:
    """The jitted step (state, batch) -> (state, metrics); the state is donated.

    Args:
        model: counts the losses.
        pipeline: finds loss and gradients.
        optimizer: elementwise, so that each device updates what it holds.
        learning_rate: for the metrics.
        max_grad_norm: gradients with a larger global norm are scaled to this.
        dropout_seed: decides, with the step, what is dropped; None for models that drop nothing.

    The metrics are float32 scalars: loss, each kind of it where there are several, grad_norm (before scaling),
    learning_rate.
    """

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        scale = factors(model.num_losses(batch))
        key = None if dropout_seed is None else jax.random.fold_in(jax.random.key(dropout_seed), state.step)
        means, grads = pipeline.loss_and_grads(state.params, batch, scale, key)
        norm = pipeline.global_norm(grads)
        shrink = jnp.where(norm > max_grad_norm, max_grad_norm / norm, 1.0)
        grads = jax.tree.map(lambda leaf: shrink * leaf, grads)
        updates, moments = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            **named(means),
            "grad_norm": norm,
            "learning_rate": learning_rate(state.step),
        }
        return TrainState(params, moments, state.step + 1), metrics

    return jax.jit(train_step, donate_argnums=0)


def make_eval_step(pipeline: Pipeline) -> Any:
    """The jitted (params, batch) -> sum of the batch's losses, of each kind."""

    def eval_step(params: Any, batch: Any) -> Any:
        return pipeline.loss(params, batch, 1.0)

    return jax.jit(eval_step)
