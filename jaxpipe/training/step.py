"""The train state and the jitted programs that make, update and evaluate it; losses as a run reports them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.checkpoints.average import average_in
from jaxpipe.checkpoints.state import has_tree_of
from jaxpipe.mesh import MEASURED, is_masked, key_of, with_trained
from jaxpipe.program import Pipeline
from jaxpipe.program.partition import Part, part_beside
from jaxpipe.training.optimizer import is_load_bias
from jaxpipe.training.task import Trained


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Older:
    """The part of a state that a schedule without flush needs of the step before.

    Attributes:
        weights: W(t-1) in the dtype of compute copies, staged and sharded as the parameters; None while a run has them
            in flight.
        norm: the last finite norm of a gradient, float32; 0 before the first.
    """

    weights: Any
    norm: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The train state: everything that a step updates.

    Attributes:
        params: staged parameters: float32, and frozen ones in the dtype of compute copies.
        optimizer: the optimizer's state, sharded as the parameters; its counts are of steps that were not skipped.
        step: steps done, skipped ones included, int32; equals the number of batches consumed.
        num_skipped: skipped steps, which left params and optimizer unchanged, int32.
        num_skipped_in_row: skipped steps since the last one that was not skipped, int32.
        older: what a schedule without flush needs of the step before; None for others.
    """

    params: Any
    optimizer: Any
    step: Any
    num_skipped: Any
    num_skipped_in_row: Any
    older: Older | None = None

    @property
    def average(self) -> Any:
        """The average of the parameters, staged and sharded as they are, with frozen ones; None: the run keeps none."""
        average = average_in(self.optimizer)
        return None if average is None else with_trained(self.params, average)


def init_state(model: Trained, pipeline: Pipeline, optimizer: optax.GradientTransformation, *, seed: int) -> TrainState:
    """The state before the first step, created sharded; equal for every mesh and schedule."""
    make = jax.jit(
        partial(_init, model, pipeline, optimizer), out_shardings=_shardings(state_like(model, pipeline, optimizer))
    )
    return make(key_of(seed))


def initial_trained(model: Trained, pipeline: Pipeline, *, seed: int) -> Any:
    """The trained ones of the staged parameters of `init_state`, as a tree without the frozen ones."""

    def make(key: jax.Array) -> Any:
        return pipeline.trained(pipeline.to_stages(pipeline.masters(model.init(key))))

    parts = pipeline.parts(jax.eval_shape(make, key_of(seed)))
    shardings = jax.tree.map(lambda part: part.sharding(pipeline.mesh), parts)
    # XLA leaves out what nothing reads: no frozen parameter is made.
    return jax.jit(make, out_shardings=shardings)(key_of(seed))


def state_of(model: Trained, pipeline: Pipeline, optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    """The state before the first step of a run that starts from the staged `params`, which are donated."""
    # Given, not inferred: XLA may replicate the optimizer's state, which ZeRO-1 splits.
    shardings = _shardings(state_like(model, pipeline, optimizer))
    return jax.jit(partial(_before_first_step, optimizer, pipeline), out_shardings=shardings, donate_argnums=0)(params)


def state_like(
    model: Trained,
    pipeline: Pipeline,
    optimizer: optax.GradientTransformation,
    init: Callable[[TrainState], TrainState] | None = None,
) -> TrainState:
    """The train state as ShapeDtypeStructs with shardings, after the `init` of a step; allocates nothing."""
    shapes = jax.eval_shape(partial(_init, model, pipeline, optimizer), key_of(0))
    shapes = jax.eval_shape(init, shapes) if init else shapes
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings_of(shapes, pipeline),
    )


def shardings_of(state: TrainState, pipeline: Pipeline) -> TrainState:
    """The shardings of a state or of its shapes; traceable."""
    params = pipeline.shardings(state.params)
    replicated = NamedSharding(pipeline.mesh, P())
    parts = pipeline.parts(state.params)
    is_staged = has_tree_of(state.params)

    def beside(leaf: Any, param: Any, part: Part) -> Any:
        # `optax.masked` leaves an object without shape in place of a parameter's moments.
        return leaf if is_masked(leaf) else part_beside(part, param, leaf).sharding(pipeline.mesh)

    def shardings(node: Any) -> Any:
        # Counters and the like, which belong to no parameter.
        if not is_staged(node):
            return replicated
        return jax.tree.map(beside, node, state.params, parts, is_leaf=is_masked)

    moments = jax.tree.map(shardings, state.optimizer, is_leaf=is_staged)
    older = None if state.older is None else Older(None if state.older.weights is None else params, replicated)
    return TrainState(params, moments, replicated, replicated, replicated, older)


def _init(model: Trained, pipeline: Pipeline, optimizer: optax.GradientTransformation, key: jax.Array) -> TrainState:
    return _before_first_step(optimizer, pipeline, pipeline.to_stages(pipeline.masters(model.init(key))))


def _before_first_step(optimizer: optax.GradientTransformation, pipeline: Pipeline, params: Any) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, optimizer.init(pipeline.trained(params)), zero, zero, zero)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def make_train_step(
    model: Trained,
    pipeline: Pipeline,
    optimizer: optax.GradientTransformation,
    learning_rate: optax.Schedule | None,
    *,
    max_grad_norm: float,
    dropout_seed: int | None = None,
) -> Any:
    """The jitted step (state, batch) -> (state, metrics); the state is donated.

    A step whose loss or gradient norm is not finite is skipped: params and optimizer stay unchanged, bit for bit, and
    the counters advance.

    Args:
        pipeline: computes loss and gradients.
        optimizer: elementwise, so that each device updates its own shard.
        learning_rate: for the metrics; a function of the steps that were not skipped, as the optimizer counts them.
            None: it is left out.
        max_grad_norm: gradients with a larger global norm are scaled down to it; loads of experts are no part of it.
        dropout_seed: seed of dropout, folded with the step; None for models without dropout.

    The metrics are scalars. Float32: loss, each kind of loss if there are several, grad_norm (before clipping),
    learning_rate. Int32: skipped (0 or 1), num_skipped_in_row (this step included), bad_parameter (index in the
    flattened trained parameters of the first one with a gradient that is not finite; -1 if there is none). A loss of a
    batch without terms is NaN, and the step is not skipped.
    """

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        scale = mean_factors(model.num_losses(batch))
        # Folded with the step, so that a resumed run draws as if it had not stopped.
        key = None if dropout_seed is None else jax.random.fold_in(key_of(dropout_seed), state.step)
        means, grads = pipeline.loss_and_grads(state.params, batch, scale, key)
        losses = name_losses(means)
        square_sums = pipeline.square_sums(grads)
        norm = norm_of(square_sums, grads)
        is_load = is_load_bias(grads)
        is_skipped = ~(jnp.isfinite(norm) & jnp.isfinite(losses["loss"]))

        def update(kept: tuple[Any, Any]) -> tuple[Any, Any]:
            params, moments = kept
            # Only scaled down. A norm of 0 never divides, since it is not above `max_grad_norm`.
            shrink = jnp.where(norm > max_grad_norm, max_grad_norm / norm, 1.0)
            clipped = jax.tree.map(lambda leaf, is_load: leaf if is_load else shrink * leaf, grads, is_load)
            updates, moments = optimizer.update(clipped, moments, params)
            return optax.apply_updates(params, updates), moments

        # A branch, not jnp.where: with that, XLA would hold the old and the new arrays side by side.
        kept = pipeline.trained(state.params), state.optimizer
        params, moments = lax.cond(is_skipped, lambda kept: kept, update, kept)
        params = with_trained(state.params, params)
        # Int32, since it is summed up.
        skipped = is_skipped.astype(jnp.int32)
        num_skipped_in_row = skipped * (state.num_skipped_in_row + 1)
        metrics = {
            **where_terms(losses, means, model.num_losses(batch)),
            "grad_norm": norm,
            # The optimizer does not count skipped steps, so its rate is of the others alone.
            **({} if learning_rate is None else {"learning_rate": learning_rate(state.step - state.num_skipped)}),
            "skipped": skipped,
            "num_skipped_in_row": num_skipped_in_row,
            "bad_parameter": first_bad(square_sums),
        }
        state = TrainState(params, moments, state.step + 1, state.num_skipped + skipped, num_skipped_in_row)
        # The state must be sharded as it came in, or donation fails and the compiled step refuses it.
        return lax.with_sharding_constraint(state, shardings_of(state, pipeline)), metrics

    return jax.jit(train_step, donate_argnums=0)


def make_eval_step(pipeline: Pipeline) -> Any:
    """The jitted evaluation (params, batch) -> sum of the batch's losses, one for each kind."""

    def eval_step(params: Any, batch: Any) -> Any:
        return pipeline.loss(params, batch, 1.0)

    return jax.jit(eval_step)


def norm_of(square_sums: jax.Array, params: Any) -> jax.Array:
    """The global norm, from float32 "leaf" sums of squares of gradients of `params`; loads of experts are left out."""
    return jnp.sqrt(square_sums.sum(where=~np.array(jax.tree.leaves(is_load_bias(params)))))


def first_bad(squares: jax.Array) -> jax.Array:
    """The index of the first of `squares` that is not finite, -1 if there is none, int32."""
    flags = ~jnp.isfinite(squares)
    # -1: argmax of no True would be 0, which is a parameter.
    return jnp.where(flags.any(), jnp.argmax(flags), -1).astype(jnp.int32)


# ---- The losses that a run reports, from sums of losses: the mean of each kind, and the sum of the means
#
# A model returns one sum, or a dict with one for each kind, and counts the terms of each. The mean over a batch is the
# sum over all microbatches and devices divided by the count over all of them, however the batch is split.


def mean_factors(num_losses: Any) -> Any:
    """Factors that turn each sum of losses into a mean, 1 where there are no terms; traceable.

    Args:
        num_losses: tree with the number of terms of each sum, from `Trained.num_losses`.
    """
    # 1 where there are no terms: the sum is 0 there, and 0 / 0 would skip the step.
    return jax.tree.map(lambda num: 1.0 / jnp.where(num > 0, num, 1), num_losses)


def name_losses(means: Any, *, prefix: str = "") -> dict[str, Any]:
    """The loss of a run, the sum of all means; then each if there are several, and what is measured beside them.

    Numbers measured in every layer, "layer ...", keep their dims.

    Args:
        means: the mean loss, or a tree of one for each kind; the path of a leaf is its name.
        prefix: put before every name.

    Example:
        >>> name_losses(2.5, prefix="eval_")
        {'eval_loss': 2.5}
        >>> name_losses({"masked_lm": 2.5, "sentence_order": 0.5})
        {'loss': 3.0, 'masked_lm_loss': 2.5, 'sentence_order_loss': 0.5}
        >>> name_losses({"words": 2.5, "measured_fullest_expert": 1.5})
        {'loss': 2.5, 'words_loss': 2.5, 'fullest_expert': 1.5}
        >>> name_losses({"first": {"words": 2.5}, "second": (0.25, 0.25)})
        {'loss': 3.0, 'first_words_loss': 2.5, 'second_0_loss': 0.25, 'second_1_loss': 0.25}
    """
    leaves = jax.tree_util.tree_leaves_with_path(means)
    # An empty path: the tree is a single number.
    if not leaves[0][0]:
        return {f"{prefix}loss": means}
    named = {jax.tree_util.keystr(path, simple=True, separator="_"): mean for path, mean in leaves}
    measured = {kind: mean for kind, mean in named.items() if kind.startswith(MEASURED)}
    kinds = {kind: mean for kind, mean in named.items() if kind not in measured}
    return {
        f"{prefix}loss": sum(kinds.values()),
        **{f"{prefix}{kind}_loss": mean for kind, mean in kinds.items()},
        **{f"{prefix}{kind.removeprefix(MEASURED)}": mean for kind, mean in measured.items()},
    }


def where_terms(losses: dict[str, Any], means: Any, num_losses: Any) -> dict[str, Any]:
    """`losses`, which are `name_losses` of `means`, with NaN for each that is a mean of no terms; traceable.

    Args:
        means: a tree of the losses.
        num_losses: number of terms of each, or one number for all.

    Example:
        >>> {name: float(loss) for name, loss in where_terms({"loss": jnp.float32(0)}, 0.0, 0).items()}
        {'loss': nan}
    """
    # One number of terms for all kinds; a tree would have a number for each.
    if jax.tree.structure(num_losses) == jax.tree.structure(0):
        num_losses = jax.tree.map(lambda _: num_losses, means)
    nums = name_losses(num_losses)
    return {name: jnp.where(nums[name] > 0, loss, jnp.nan) for name, loss in losses.items()}


def format_losses(losses: dict[str, float], *, unit: str) -> str:
    """The result of `name_losses` as text.

    Example:
        >>> format_losses({"eval_loss": 3.0}, unit=" nats per token")
        'loss 3.0000 nats per token'
        >>> losses = {"eval_loss": 3.0, "eval_masked_lm_loss": 2.5, "eval_sentence_order_loss": 0.5}
        >>> format_losses(losses, unit=" nats")
        'loss 3.0000 nats (masked_lm 2.5000, sentence_order 0.5000)'
        >>> format_losses({}, unit=" nats")
        'loss none: nothing in these batches is to be predicted'
    """
    if not losses:
        return "loss none: nothing in these batches is to be predicted"
    (_, loss), *kinds = losses.items()
    named_kinds = (f"{name.removeprefix('eval_').removesuffix('_loss')} {mean:.4f}" for name, mean in kinds)
    return f"loss {loss:.4f}{unit}" + (f" ({', '.join(named_kinds)})" if kinds else "")
