"""A training step before it is traced: what it says of its arguments is what they are, and it trains."""

import jax
import pytest

from jaxpipe.compile import compile_step, training_step
from jaxpipe.config import base_config, check


def small_config(schedule):
    config = base_config("gpt")
    config.model.update(num_layers=2, hidden=32, num_heads=2, vocab_size=256)
    config.data.update(batch_size=8, seq_len=16)
    config.pipeline.update(schedule=schedule, num_microbatches=4)
    config.mesh.update(pipe=2, platform="cpu")
    config.optimizer.learning_rate = 1e-2
    check(config)
    return config


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("pipedream_2bw", marks=pytest.mark.ci)])
def test_arrays_are_as_told_and_losses_fall(schedule):
    of = training_step(small_config(schedule), jax.devices()[:2])
    state, batch = of.init(), of.example()
    for arrays, told in ((state, of.state), (batch, of.batch)):
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), arrays) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), told
        )
    step = of.step.lower(of.state, of.batch).compile()
    losses = []
    for _ in range(6):
        state, metrics = step(state, lambda: batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.05


@pytest.mark.ci
def test_a_compiled_step_is_that_step():
    config, devices = small_config("1f1b"), jax.devices()[:2]
    of, compiled = training_step(config, devices), compile_step(config, devices)
    assert compiled.state == of.state
    assert compiled.batch == of.batch
    assert compiled.spec == of.spec
