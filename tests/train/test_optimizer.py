"""The learning rate's shape and what weight decay leaves alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config, model_config
from jaxpipe.config.optimizers import OPTIMIZERS, is_kernel
from jaxpipe.estimate.parameters import NUM_COUNTERS, parameter_bytes
from jaxpipe.estimate.setting import undecided
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.training.optimizer import error_feedback, learning_rate, make_optimizer, with_load_bias


@pytest.fixture
def config():
    config = base_config()
    config.train.steps = 100
    config.optimizer.learning_rate = 1.0
    config.optimizer.warmup_fraction = 0.1
    return config


def test_learning_rate_rises_to_the_peak_and_falls_to_its_fraction(config):
    rate = learning_rate(config)
    assert 0 < float(rate(0)) < 0.2
    assert float(rate(10)) == pytest.approx(1.0)
    assert float(rate(55)) == pytest.approx(0.55)  # the cosine's middle: (1 + 0.1) / 2
    assert float(rate(100)) == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "decay"), [(0.5, 1.0), (0.05, 0.2)])
def test_a_line_down_ends_with_the_run(config, warmup, decay):
    config.optimizer.update(schedule="wsd", warmup_fraction=warmup, decay_fraction=decay)
    assert float(learning_rate(config)(100)) == pytest.approx(0.1)
    assert max(float(learning_rate(config)(step)) for step in range(100)) == pytest.approx(1.0)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warm_up_in_steps_replaces_the_fraction(config, schedule):
    """A line from 1 / (n + 1) of the peak to the peak after n steps, then what n / steps as a fraction gives."""
    config.optimizer.update(schedule=schedule, warmup_steps=4)
    in_steps = learning_rate(config)
    assert [float(in_steps(step)) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    config.optimizer.update(warmup_fraction=0.04, warmup_steps=0)
    by_fraction = learning_rate(config)
    assert [float(in_steps(step)) for step in range(101)] == [float(by_fraction(step)) for step in range(101)]


def test_learning_rate_needs_no_warm_up(config):
    config.optimizer.warmup_fraction = 0.0
    assert float(learning_rate(config)(0)) == pytest.approx(1.0)


def test_a_parameter_without_a_name_is_no_kernel(config):
    params = {"shared": {"table": jnp.ones(3)}, "layers": [jnp.ones((2, 3)), ({"kernel": jnp.ones((2, 3))},)]}
    assert is_kernel(params) == {"shared": {"table": False}, "layers": [False, ({"kernel": True},)]}
    make_optimizer(config).init(params)


def test_only_kernels_decay(config):
    model = LanguageModel(
        GPTConfig(num_layers=2, hidden=8, num_heads=2, vocab_size=16, num_positions=4, tie_embeddings=False)
    )
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), jax.eval_shape(model.init, jax.random.key(0)))
    optimizer = make_optimizer(config)

    @jax.jit
    def decays(params):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        return jax.tree.map(lambda update: (update < 0).all(), updates)

    decayed = jax.tree.map(bool, decays(params))
    assert decayed == is_kernel(params)
    assert {path[-2].key for path, yes in jax.tree_util.tree_leaves_with_path(decayed) if yes} == {
        "head",
        "query_key_value",
        "output",
        "up",
        "down",
    }


def test_wsd_stays_at_the_peak_and_goes_down_in_a_line(config):
    config.optimizer.update(schedule="wsd", decay_fraction=0.2)
    rate = learning_rate(config)
    assert [float(rate(step)) for step in (10, 50, 80)] == pytest.approx([1.0] * 3)
    assert float(rate(90)) == pytest.approx(0.55)  # the middle of the line: (1 + 0.1) / 2
    assert float(rate(100)) == pytest.approx(0.1)


def test_a_constant_rate_only_warms_up(config):
    config.optimizer.schedule = "constant"
    rate = learning_rate(config)
    assert float(rate(0)) < 0.2
    assert {float(rate(step)) for step in (10, 50, 100)} == {1.0}


@pytest.mark.parametrize("name", ["adamw", "muon", None])
def test_the_bias_of_an_expert_moves_by_its_rate_against_its_load(name):
    """Whatever the size of the load, the learning rate and the steps before; nothing else moves so."""
    config = base_config("mixtral")
    config.model.update(num_layers=2, hidden=8, num_heads=2, vocab_size=256, num_experts=4, bias_rate=0.25)
    config.optimizer.name = name or "adamw"
    shapes = jax.eval_shape(LanguageModel(model_config(config)).init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    grads = jax.tree.map(np.zeros_like, params)
    grads["layers"]["feed_forward"]["load_bias"] = np.array([[3.0, -0.01, 0.0, 1e-7], [0.0] * 4], np.float32)
    optimizer = make_optimizer(config) if name else with_load_bias(optax.adamw(1.0), config)  # as `fit` takes one
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(2):
        updates, state = update(grads, state, params)
        moved = updates["layers"]["feed_forward"].pop("load_bias")
        np.testing.assert_array_equal(moved, [[-0.25, 0.25, 0.0, 0.0], [0.0] * 4])
    assert all((np.asarray(update) <= 0).all() for update in jax.tree.leaves(updates))  # weight decay


@pytest.mark.parametrize(("name", "feedback"), [*((name, False) for name in OPTIMIZERS), ("muon", True)])
def test_every_optimizer_decays_kernels_alone_and_says_how_many_moments_it_has(config, name, feedback):
    """Without a gradient only weight decay moves anything; the estimator counts the state to the byte."""
    config.optimizer.update(name=name, error_feedback=feedback)
    config.model.update(num_layers=2, hidden=8, num_heads=2, vocab_size=256)
    config.data.seq_len = 4
    model = LanguageModel(model_config(config))
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    optimizer = make_optimizer(config)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, state = jax.jit(optimizer.update)(zeros, optimizer.init(params), params)
    moved = jax.tree.map(lambda update: bool((update != 0).any()), updates)
    assert moved == is_kernel(params)
    config.mesh.pipe = 1
    setting = undecided(config, parse_topology("a100-80g:1x1"))
    counted = parameter_bytes(dataclasses.replace(setting, layers_per_stage=(2,)), chunks=1, replicas=1)
    floats = sum(leaf.size for leaf in jax.tree.leaves((params, state)) if leaf.dtype == np.float32)
    assert counted.optimizer - 4 * (NUM_COUNTERS + feedback) == 4 * floats


def test_error_feedback_adds_what_the_gradient_before_lacked():
    params = {"kernel": np.zeros(2, np.float32)}
    feedback = error_feedback()
    state = feedback.init(params)
    found = []
    for gradient in ([1.0, -2.0], [3.0, 0.0], [3.0, 1.0]):
        updates, state = feedback.update({"kernel": np.array(gradient, np.float32)}, state, params)
        found.append(updates["kernel"].tolist())
    assert found == [[1.0, -2.0], [5.0, 2.0], [3.0, 2.0]]
