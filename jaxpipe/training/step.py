"""The train state and the functions that make, change and evaluate it, each one jitted program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.training.losses import factors, named

NUM_COUNTERS = 3  # the last fields of a TrainState


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "optimizer", "step", "num_skipped", "num_skipped_in_row"],
    meta_fields=[],
)
@dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    Attributes:
        params: staged parameters, float32.
        optimizer: the optimizer's state, sharded as the parameters; its counts are of steps that were not skipped.
        step: steps done, skipped ones included, int32: how many batches have been used.
        num_skipped: of these, how many left params and optimizer as they were, int32.
        num_skipped_in_row: how many of the last ones, without one between that was not, int32.
    """

    params: Any
    optimizer: Any
    step: Any
    num_skipped: Any
    num_skipped_in_row: Any


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
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        _shardings_of(shapes, pipeline, optimizer),
    )


def _shardings_of(state: TrainState, pipeline: Pipeline, optimizer: optax.GradientTransformation) -> TrainState:
    """The shardings of `state`, or of its shapes; traceable."""
    params, replicated = pipeline.shardings(state.params), NamedSharding(pipeline.mesh, P())
    moments = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.optimizer,
        params,
        transform_non_params=lambda _: replicated,
    )
    return TrainState(params, moments, *[replicated] * NUM_COUNTERS)


def _init(
    model: LanguageModel, pipeline: Pipeline, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    return _before_first_step(optimizer, pipeline.to_stages(model.init(key)))


def _before_first_step(optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    return TrainState(params, optimizer.init(params), *(jnp.zeros((), jnp.int32) for _ in range(NUM_COUNTERS)))


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

    A step whose loss or gradient norm is not finite is skipped: params and optimizer stay as they were, bit for bit,
    and the counters go on.

    Args:
        model: counts the losses.
        pipeline: finds loss and gradients.
        optimizer: elementwise, so that each device updates what it holds.
        learning_rate: for the metrics, of the steps that were not skipped, as the optimizer counts them.
        max_grad_norm: gradients with a larger global norm are scaled to this.
        dropout_seed: decides, with the step, what is dropped; None for models that drop nothing.

    The metrics are scalars. Float32: loss, each kind of it where there are several, grad_norm (before scaling),
    learning_rate. Int32: skipped (0 or 1), num_skipped_in_row (this step included), bad_parameter (index in the
    flattened parameters of the first one whose gradient is not finite; -1 where all are).
    """

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        scale = factors(model.num_losses(batch))
        key = None if dropout_seed is None else jax.random.fold_in(jax.random.key(dropout_seed), state.step)
        means, grads = pipeline.loss_and_grads(state.params, batch, scale, key)
        losses, square_sums = named(means), pipeline.square_sums(grads)
        norm = jnp.sqrt(square_sums.sum())
        is_skipped = ~(jnp.isfinite(norm) & jnp.isfinite(losses["loss"]))

        def update(kept: tuple[Any, Any]) -> tuple[Any, Any]:
            params, moments = kept
            shrink = jnp.where(norm > max_grad_norm, max_grad_norm / norm, 1.0)
            clipped = jax.tree.map(lambda leaf: shrink * leaf, grads)
            updates, moments = optimizer.update(clipped, moments, params)
            return optax.apply_updates(params, updates), moments

        # A branch, not a choice between old and new numbers, which XLA would hold side by side.
        params, moments = lax.cond(is_skipped, lambda kept: kept, update, (state.params, state.optimizer))
        skipped = is_skipped.astype(jnp.int32)
        num_skipped_in_row = skipped * (state.num_skipped_in_row + 1)
        metrics = {
            **losses,
            "grad_norm": norm,
            "learning_rate": learning_rate(state.step - state.num_skipped),
            "skipped": skipped,
            "num_skipped_in_row": num_skipped_in_row,
            "bad_parameter": _first(~jnp.isfinite(square_sums)),
        }
        state = TrainState(params, moments, state.step + 1, state.num_skipped + skipped, num_skipped_in_row)
        return lax.with_sharding_constraint(state, _shardings_of(state, pipeline, optimizer)), metrics

    return jax.jit(train_step, donate_argnums=0)


def make_eval_step(pipeline: Pipeline) -> Any:
    """The jitted (params, batch) -> sum of the batch's losses, of each kind."""

    def eval_step(params: Any, batch: Any) -> Any:
        return pipeline.loss(params, batch, 1.0)

    return jax.jit(eval_step)


def _first(flags: jax.Array) -> jax.Array:
    """The index of the first that is true, -1 where none is, int32."""
    return jnp.where(flags.any(), jnp.argmax(flags), -1).astype(jnp.int32)
