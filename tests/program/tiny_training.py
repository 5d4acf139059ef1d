"""Three AdamW steps of a tiny model, by the pipeline's train step and by plain jax and optax on one device."""

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tiny_models import ModelConfig, random_batch, random_params, summed

from jaxpipe.config.optimizers import is_kernel
from jaxpipe.mesh import Randomness
from jaxpipe.models import BertConfig, LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.training.step import TrainState, init_state, make_train_step, mean_factors, name_losses

NUM_STEPS, LEARNING_RATE, DROPOUT_SEED = 3, 1e-2, 7
MAX_GRAD_NORM = 0.5  # less than any norm here: every step clips
BETA1, EPSILON = 0.9, 1e-3
ADAMW = optax.adamw(LEARNING_RATE, b1=BETA1, b2=0.95, eps=EPSILON, weight_decay=0.1, mask=is_kernel)


class Training(NamedTuple):
    """What the steps did; trees in canonical layer order."""

    losses: list[float]  # [step]
    grad_norms: list[float]  # [step] before clipping
    grads: Any  # clipped, of the first step
    params: Any  # after the last step, as are the moments
    first_moment: Any
    second_moment: Any


def start_training(pipeline: Pipeline, config: ModelConfig) -> tuple[TrainState, Any]:
    """The state of `random_params` before the first step, and the compiled train step."""
    random_model: Any = SimpleNamespace(init=lambda _: random_params(config))
    state = init_state(random_model, pipeline, ADAMW, seed=0)
    train_step = make_train_step(
        LanguageModel(config),
        pipeline,
        ADAMW,
        optax.constant_schedule(LEARNING_RATE),
        max_grad_norm=MAX_GRAD_NORM,
        dropout_seed=DROPOUT_SEED if config.anatomy.has_dropout else None,
    )
    batch = batches_on_mesh(pipeline, family_of(config))[0]
    return state, train_step.lower(state, batch).compile()


def family_of(config: ModelConfig) -> str:
    """Of those that have batches of their own."""
    return "bert" if isinstance(config, BertConfig) else "gpt"


def batches_on_mesh(pipeline: Pipeline, family: str = "gpt") -> list[Any]:
    """The batch of each step, of which each process may hold a part."""
    return jax.tree.map(
        lambda leaf: jax.make_array_from_callback(leaf.shape, pipeline.batch_sharding, leaf.__getitem__),
        batches(pipeline.schedule.num_microbatches, family),
    )


def train_pipelined(pipeline: Pipeline, config: ModelConfig) -> Training:
    """The steps of `make_train_step`."""
    state, train_step = start_training(pipeline, config)
    from_stages = jax.jit(pipeline.from_stages)
    metrics, first_moments = [], []
    for batch in batches_on_mesh(pipeline, family_of(config)):
        state, metrics_of_step = train_step(state, batch)
        metrics.append(jax.tree.map(float, metrics_of_step))
        first_moments.append(jax.tree.map(np.asarray, from_stages(state.optimizer[0].mu)))
    return Training(
        [of_step["loss"] for of_step in metrics],
        [of_step["grad_norm"] for of_step in metrics],
        jax.tree.map(lambda leaf: leaf / (1 - BETA1), first_moments[0]),  # as the moment was 0 before
        from_stages(state.params),
        first_moments[-1],
        from_stages(state.optimizer[0].nu),
    )


def batches(num_microbatches: int, family: str = "gpt") -> list[dict[str, np.ndarray]]:
    """The batch of each step."""
    return [random_batch(num_microbatches, seed=step, family=family) for step in range(NUM_STEPS)]


def train_on_one_device(config: ModelConfig, batches: list[dict[str, np.ndarray]]) -> Training:
    """The same by `jax.grad`, microbatch by microbatch, the gradients added up in float64."""
    clip = optax.clip_by_global_norm(MAX_GRAD_NORM)
    params, losses, norms, first = random_params(config), [], [], None
    state = jax.jit(ADAMW.init)(params)

    @jax.jit
    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any, Any]:
        clipped, _ = clip.update(grads, clip.init(params))
        updates, state = ADAMW.update(clipped, state, params)
        return clipped, optax.apply_updates(params, updates), state

    for i, batch in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(DROPOUT_SEED), i) if config.anatomy.has_dropout else None
        loss, grads = mean_loss_and_grads(config, params, batch, key)
        losses.append(float(loss))
        norms.append(float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(grads)))))
        clipped, params, state = update(jax.tree.map(np.float32, grads), state, params)
        first = first or clipped
    return Training(losses, norms, first, params, state[0].mu, state[0].nu)


def mean_loss_and_grads(config: Any, params: Any, batch: Any, key: jax.Array | None = None) -> tuple[Any, Any]:
    """The mean over the valid tokens of all microbatches, and its gradients, float64."""
    random = None if key is None else Randomness(jax.random.key_data(key), jnp.int32(0))
    scale = mean_factors(LanguageModel(config).num_losses(batch))
    each = [
        _value_and_grad(config)(params, jax.tree.map(lambda leaf, m=m: leaf[m], batch), scale, random, m)
        for m in range(len(batch["tokens"]))
    ]
    return summed(each)


@functools.cache
def _value_and_grad(config: ModelConfig) -> Any:
    def loss(params: Any, microbatch: Any, scale: Any, random: Randomness | None, m: int) -> jax.Array:
        means = jax.tree.map(jnp.multiply, scale, LanguageModel(config).loss_sum(params, microbatch, random, m))
        return name_losses(means)["loss"]

    return jax.jit(jax.value_and_grad(loss))
