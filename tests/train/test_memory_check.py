"""A run that cannot fit is refused before anything is compiled."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

from jaxpipe.config import base_config
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import resolve
from jaxpipe.program.held_bytes import bytes_per_device, held_bytes
from jaxpipe.training.report import check_memory
from jaxpipe.training.setup import build_pipeline, optimizer_and_step
from jaxpipe.training.step import state_like


@pytest.fixture(scope="module")
def run():
    config = base_config()
    config.model.num_layers, config.model.hidden, config.model.num_heads = 4, 32, 2
    config.mesh.pipe, config.pipeline.num_microbatches = 4, 8
    model, pipeline = build_pipeline(resolve(config), jax.devices()[:4])
    state = state_like(model, pipeline, optax.adam(1e-3))
    shape = jax.ShapeDtypeStruct((8, 4, 128), jnp.int32)
    _, step = optimizer_and_step(resolve(config), model, pipeline)
    return step, state, {"tokens": shape, "targets": shape}


def test_what_is_held_must_fit(run):
    step, state, batch = run
    needed = bytes_per_device(state) + sum(held_bytes(step.shapes(state.params, batch)).values())
    assert bytes_per_device(state) > 3 * 4 * 12 * 32 * 32  # one layer's kernels, 12 h^2, and two moments, float32
    check_memory(step, state, batch, limit_bytes=needed)
    with pytest.raises(ConfigError, match="a step needs at least") as error:
        check_memory(step, state, batch, limit_bytes=needed - 1)
    assert "train state" in str(error.value)
    assert "pages" in str(error.value)
    assert "repair: " in str(error.value)


def test_a_device_that_does_not_know_its_memory_passes(run):
    step, state, batch = run
    assert isinstance(jax.tree.leaves(state)[0].sharding, NamedSharding)
    check_memory(step, state, batch)
