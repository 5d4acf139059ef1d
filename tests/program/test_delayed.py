"""Steps of a schedule without flush are those of its delayed rule, computed plainly on one device.

W(t+1) = W(t) - lr grad f_t(W(t-1)), where W(-1) = W(0) (Narayanan et al., ICML 2021, section 3.1); clipped by the norm
of the gradient before. The bound is that of plain gradients, `tiny_gpt` explains it.
"""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from tiers import tiers
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors
from tiny_training import mean_loss_and_grads

from jaxpipe.models import LanguageModel
from jaxpipe.schedules import build
from jaxpipe.training.delayed import DelayedStep
from jaxpipe.training.optimizer import is_kernel, labels_of_muon, scale_by_muon
from jaxpipe.training.step import init_state

LARGEST_ERROR, OF_CHANGE = 1e-5, 1e-3
MAX_GRAD_NORM = 0.5  # less than most norms here: nearly every step clips
SEED = 7
OPTIMIZERS = {
    "sgd": optax.sgd(0.05),
    "muon": optax.multi_transform(
        {
            "muon": optax.chain(
                scale_by_muon(config_of("gpt", num_layers=1).anatomy, beta=0.9), optax.scale_by_learning_rate(1e-2)
            ),
            "adamw": optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-3),
        },
        labels_of_muon,
    ),
    "adamw": optax.adamw(1e-2, b1=0.9, b2=0.95, eps=1e-3, weight_decay=0.1, mask=is_kernel),
}


def batch_of(step: int, num_microbatches: int, family: str = "gpt") -> Any:
    return random_batch(num_microbatches, seed=step, family=family)


def plain_steps(config, optimizer, num_microbatches: int, num_steps: int, *, delay: int = 1, family: str = "gpt"):
    """Losses, norms and parameters of the delayed rule, from the equation alone."""
    versions, losses, norms = [random_params(config)], [], [0.0]
    state = optimizer.init(versions[0])
    for step in range(num_steps):
        used = versions[max(step - delay, 0)]
        key = jax.random.fold_in(jax.random.key(SEED), step) if config.anatomy.has_dropout else None
        loss, grads = mean_loss_and_grads(config, used, batch_of(step, num_microbatches, family), key)
        shrink = MAX_GRAD_NORM / norms[-1] if norms[-1] > MAX_GRAD_NORM else 1.0
        grads = jax.tree.map(lambda leaf, shrink=shrink: np.float32(shrink * leaf), grads)
        updates, state = optimizer.update(grads, state, versions[-1])
        versions.append(optax.apply_updates(versions[-1], updates))
        losses.append(float(loss))
        norms.append(float(np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(grads)))) / shrink)
    return losses, norms[1:], versions[-1]


def start(pipeline, config, name, *, num_steps: int):
    optimizer = OPTIMIZERS[name]
    random_model: Any = SimpleNamespace(init=lambda _: random_params(config))
    state = init_state(random_model, pipeline, optimizer, seed=0)
    step = DelayedStep(
        LanguageModel(config),
        pipeline,
        optimizer,
        optax.constant_schedule(0.05),
        MAX_GRAD_NORM,
        SEED if config.anatomy.has_dropout else None,
        num_steps,
        reads_matrices=name == "muon",
    )
    return state, step


def pipelined_steps(pipeline, config, name, num_steps: int, *, family: str = "gpt"):
    state, step = start(pipeline, config, name, num_steps=num_steps)
    batches = iter(batch_of(each, pipeline.schedule.num_microbatches, family) for each in range(num_steps))
    rows = []
    for _ in range(num_steps):
        state, metrics = step(state, lambda: next(batches))
        rows.append(jax.tree.map(float, metrics))
    params = jax.tree.map(np.asarray, jax.jit(pipeline.from_stages)(state.params))
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows], params


# D, N, data, tensor, layers per stage, optimizer, further choices
CASES = tiers(
    [(2, 2, 1, 1, (1, 1), "sgd", {}), (4, 5, 1, 1, (1, 2, 2, 1), "adamw", {})],
    ci=[
        (2, 7, 2, 2, (2, 1), "adamw", {"tie_embeddings": False}),
        (4, 4, 2, 1, (1, 1, 1, 1), "sgd", {}),
        (4, 13, 1, 2, (1, 1, 1, 2), "sgd", {"split_masters": False}),
        (8, 8, 1, 1, (1,) * 8, "adamw", {}),
        (3, 6, 2, 1, (1, 2, 1), "sgd", {"family": "llama"}),
        (2, 4, 2, 1, (1, 1), "sgd", {"dropout": 0.2}),
        (2, 3, 1, 2, (2, 1), "sgd", {"family": "bert"}),
        (2, 3, 2, 2, (1, 2), "muon", {}),
    ],
    slow=[
        (8, 16, 1, 1, (1,) * 8, "sgd", {}),
        (8, 25, 1, 1, (1,) * 8, "adamw", {}),
        (4, 8, 1, 2, (1, 1, 1, 1), "adamw", {"family": "llama"}),
    ],
)
NUM_STEPS = 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_steps_are_those_of_the_delayed_rule(case):
    num_devices, size, data, tensor, layers, name, choices = case
    choices = dict(choices)
    family, dropout = choices.pop("family", "gpt"), choices.pop("dropout", 0.0)
    of_model = {key: choices.pop(key) for key in ("tie_embeddings",) if key in choices}
    config = config_of(family, num_layers=sum(layers), dropout=dropout, **of_model)
    schedule = build("pipedream_2bw", num_devices=num_devices, num_microbatches=size)
    pipeline = pipeline_of(schedule, config, data=data, tensor=tensor, layers_per_stage=layers, **choices)
    of_family = "bert" if family == "bert" else "gpt"
    losses, norms, params = pipelined_steps(pipeline, config, name, NUM_STEPS, family=of_family)
    wanted_losses, wanted_norms, wanted = plain_steps(config, OPTIMIZERS[name], size, NUM_STEPS, family=of_family)
    np.testing.assert_allclose(losses, wanted_losses, rtol=LARGEST_ERROR)
    np.testing.assert_allclose(norms, wanted_norms, rtol=10 * LARGEST_ERROR)
    if name == "sgd":
        errors = relative_errors(params, wanted)
        assert max(errors.values()) <= LARGEST_ERROR, errors
    else:
        change, wanted_change = (
            jax.tree.map(lambda leaf, first: leaf - first, tree, random_params(config)) for tree in (params, wanted)
        )
        errors = relative_errors(change, wanted_change)
        assert max(errors.values()) <= OF_CHANGE, errors


@pytest.mark.ci
def test_a_version_taken_one_step_wrong_would_be_seen():
    config = config_of("gpt", num_layers=2)
    losses, _, params = plain_steps(config, OPTIMIZERS["sgd"], 2, NUM_STEPS)
    for delay in (0, 2):
        other_losses, _, other = plain_steps(config, OPTIMIZERS["sgd"], 2, NUM_STEPS, delay=delay)
        assert max(relative_errors(other, params).values()) > 100 * LARGEST_ERROR
        assert max(abs(np.array(other_losses) / losses - 1)) > 100 * LARGEST_ERROR
