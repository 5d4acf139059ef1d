"""Every layer of every microbatch has a key of its own, whatever the index's type, and the mesh changes none."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.mesh import Randomness, key_of

STEP = Randomness(jax.random.key_data(jax.random.key(3)), jnp.int32(5))


def test_keys_differ_by_microbatch_and_layer():
    keys = {tuple(STEP.at(m, layer).words.tolist()) for m in range(8) for layer in range(-1, 8)}
    assert len(keys) == 8 * 9
    assert tuple(STEP.words.tolist()) not in keys


def test_the_default_kind_of_keys_does_not_matter():
    with jax.default_prng_impl("rbg"):
        found = Randomness(jax.random.key_data(key_of(3)), jnp.int32(5)).at(0, 0)
    np.testing.assert_array_equal(found.words, STEP.at(0, 0).words)


def test_keys_differ_by_step():
    steps = [jax.random.fold_in(jax.random.key(3), step) for step in range(8)]
    keys = {tuple(replace(STEP, words=jax.random.key_data(key)).at(0, 0).words.tolist()) for key in steps}
    assert len(keys) == 8


def test_a_traced_index_is_the_same_as_a_number():
    traced = jax.jit(lambda m, layer: STEP.at(m, layer).words)
    for layer in (-1, 0, 3):
        np.testing.assert_array_equal(traced(2, layer), STEP.at(2, layer).words)
        np.testing.assert_array_equal(traced(np.int32(2), np.int32(layer)), STEP.at(2, layer).words)


def test_the_first_sequence_is_kept_and_changes_no_key():
    other = replace(STEP, first_sequence=jnp.int32(7)).at(1, 2)
    assert int(other.first_sequence) == 7
    np.testing.assert_array_equal(other.words, STEP.at(1, 2).words)
