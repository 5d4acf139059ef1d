"""The learning rate's shape and what weight decay leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.config import base_config
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.training.setup import is_kernel, learning_rate, make_optimizer


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


def test_learning_rate_needs_no_warm_up(config):
    config.optimizer.warmup_fraction = 0.0
    assert float(learning_rate(config)(0)) == pytest.approx(1.0)


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
