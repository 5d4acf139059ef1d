"""The optimizer of a run, a row of `jaxpipe.config.optimizers` with what is put around it; the learning rate by step.

Gradients are clipped before, in `step`. Muon's update of a matrix reads the whole matrix: where masters are split over
devices, XLA sums or gathers what its products need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe.checkpoints.average import AveragedState
from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.model import family_of
from jaxpipe.config.optimizers import MATRICES_BY_NAME, OPTIMIZERS, Matrices, name_of
from jaxpipe.models.anatomy import LOAD_BIAS


def make_optimizer(config: RunConfig, params: Any = None) -> optax.GradientTransformation:
    """The optimizer of a checked config.

    Args:
        config: the config.
        params: canonical parameters, or their shapes, of a model given in Python: each parameter of a layer that has
            two dims is a matrix. Of a family those are the kernels.
    """
    if family_of(config).is_given:
        leaves = jax.tree_util.tree_leaves_with_path(params["layers"])
        paths = {path for path, leaf in leaves if len(leaf.shape) == 3}  # the first dim counts layers
        matrices = Matrices(paths.__contains__)
    else:
        matrices = MATRICES_BY_NAME._replace(anatomy=model_config(config).anatomy)
    optimizer = OPTIMIZERS[config.optimizer.name].make(config.optimizer, learning_rate(config), matrices)
    if config.optimizer.error_feedback:
        optimizer = optax.chain(error_feedback(), optimizer)
    return with_load_bias(optimizer, config)


def with_load_bias(optimizer: optax.GradientTransformation, config: RunConfig) -> optax.GradientTransformation:
    """`optimizer`, and the rule of `model.bias_rate` for the bias of experts, whose gradients are their loads."""
    rate = getattr(config.model, "bias_rate", 0.0)
    if not rate:
        return optimizer
    of_each = {True: lower_bias_of_busy_experts(rate), False: optimizer}
    return optax.multi_transform(of_each, is_load_bias)  # pyright: ignore[reportArgumentType]  # labels are hashable


# ---- The bias of experts

# Below this a load counts as the mean: without it rounding would decide the sign, and the bias, by mesh.
_BALANCED_LOAD_TOLERANCE = 1e-5  # the rounding of sums of loads, which differs from mesh to mesh


def is_load_bias(params: Any) -> Any:
    """A tree of bools that selects the biases of experts, whose gradients are loads, by the name of each leaf."""
    return jax.tree_util.tree_map_with_path(lambda path, _: name_of(path) == LOAD_BIAS, params)


def lower_bias_of_busy_experts(rate: float) -> optax.GradientTransformation:
    """Adds `rate` to the biases of experts with less load than the mean, and takes it from those with more.

    Source: DeepSeek-V3 technical report, 2024 (arXiv 2412.19437), section 2.1.2.
    """

    def update(load: jax.Array) -> jax.Array:
        # Loads are given as gradients, load minus mean; only their sign counts, as in the source.
        return jnp.where(jnp.abs(load) > _BALANCED_LOAD_TOLERANCE, -rate * jnp.sign(load), 0.0)

    return optax.stateless(lambda loads, _: jax.tree.map(update, loads))


# ---- Error feedback


class FeedbackState(NamedTuple):
    """State of `error_feedback`: the steps done, int32, and the gradient before, like the parameters."""

    num_steps: jax.Array
    before: Any


def error_feedback() -> optax.GradientTransformation:
    """Adds to each gradient what the one before it lacked: g(t) becomes g(t) + (g(t) - g(t-1)).

    Without flush step t applies g(t-1), the gradient that is there, in place of g(t), which it should. The error is
    g(t) - g(t-1); it is known a step later, and is made good then. The first gradient is left as it is.

    Source: the idea, and one buffer of a gradient's size, from Zmushko et al., ICML 2026 (arXiv 2606.30634), section 3;
    the formula is our reading, derived from error feedback for compressed gradients (Seide et al. 2014).
    """

    def init(params: Any) -> FeedbackState:
        return FeedbackState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: FeedbackState, params: Any = None) -> tuple[Any, FeedbackState]:
        del params
        # In the first step `before` holds zeros, no gradient: a correction would double the step.
        made_good = (state.num_steps > 0).astype(jnp.float32)
        corrected = jax.tree.map(lambda now, before: now + made_good * (now - before), updates, state.before)
        return corrected, FeedbackState(state.num_steps + 1, updates)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  # optax has tree types


# ---- Average of the weights


def with_average(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """`optimizer`, with an average of the weights that each of its updates moves; itself if `decay` is 0.

    average = decay * average + (1 - decay) * weights, in float32. It begins at the initial weights, so it needs no
    correction for a beginning at 0. An update that is not made, as that of a skipped step, does not move it.

    Args:
        optimizer: the optimizer with all that is put around it: the average is of what becomes of the weights.
        decay: at least 0, less than 1.
    """
    if not decay:
        return optimizer

    def init(params: Any) -> AveragedState:
        # Copies: a step donates the parameters and the average, which must not be one array.
        return AveragedState(jax.tree.map(jnp.copy, params), optimizer.init(params))

    def update(updates: Any, state: AveragedState, params: Any = None) -> tuple[Any, AveragedState]:
        updates, inner = optimizer.update(updates, state.inner, params)
        after = optax.apply_updates(params, updates)
        # Not decay * average + (1 - decay) * weights: in float32 the two factors do not sum to 1, and of weights that
        # rest the average would be off by 3e-4 of them at a decay of 0.9999.
        average = jax.tree.map(lambda mean, new: mean + (1 - decay) * (new - mean), state.average, after)
        return updates, AveragedState(average, inner)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  # optax has tree types


# ---- Learning rate


def learning_rate(config: RunConfig) -> optax.Schedule:
    """The learning rate by step: linear warm-up to the peak, then as `optimizer.schedule` says."""
    fields = config.optimizer
    steps = config.train.steps
    num_warmup = fields.warmup_steps or round(fields.warmup_fraction * steps)
    # From 1 / (n + 1) of the peak, not from 0: a first step of rate 0 would be lost. At least one step, since optax
    # divides by their number.
    warmup = optax.linear_schedule(fields.learning_rate / (num_warmup + 1), fields.learning_rate, max(num_warmup, 1))
    return optax.join_schedules([warmup, RATES[fields.schedule](config, steps - num_warmup)], [num_warmup])


def _cosine(config: RunConfig, steps: int) -> optax.Schedule:
    fields = config.optimizer
    return optax.cosine_decay_schedule(fields.learning_rate, max(steps, 1), alpha=fields.final_learning_rate_fraction)


def _constant(config: RunConfig, steps: int) -> optax.Schedule:
    del steps
    return optax.constant_schedule(config.optimizer.learning_rate)


def _wsd(config: RunConfig, steps: int) -> optax.Schedule:
    """Stable, then down in a line; source: Hu et al., MiniCPM (arXiv 2404.06395), section 4."""
    fields = config.optimizer
    # Bounded by the steps after warm-up, so that a short run still comes down to the final rate.
    num_down = min(max(1, round(fields.decay_fraction * config.train.steps)), max(steps, 1))
    last = fields.final_learning_rate_fraction * fields.learning_rate
    return optax.linear_schedule(fields.learning_rate, last, num_down, transition_begin=max(steps - num_down, 0))


RATES: dict[str, Callable[[RunConfig, int], optax.Schedule]] = {"cosine": _cosine, "wsd": _wsd, "constant": _constant}
