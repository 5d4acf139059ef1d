"""Rotary positions against the published formulas, and that they save nothing."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.models.rotary import RotaryScaling, frequencies, rotate


def _normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(shape).standard_normal(shape, np.float32)


def _rotated(x, angles):
    """As complex numbers: element i and i + head_dim / 2 are the two parts of number i."""
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    turned = (first + 1j * second) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _llama_3_1(frequency: float) -> float:
    """`apply_scaling` of Meta's llama-models, with its constants."""
    scale_factor, low_freq_factor, high_freq_factor, old_context_len = 8, 1, 4, 8192
    wavelen = 2 * math.pi / frequency
    if wavelen < old_context_len / high_freq_factor:
        return frequency
    if wavelen > old_context_len / low_freq_factor:
        return frequency / scale_factor
    smooth = (old_context_len / wavelen - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * frequency / scale_factor + smooth * frequency


def test_frequencies_are_those_of_the_paper():
    expected = [10000 ** (-2 * (i - 1) / 64) for i in range(1, 33)]
    np.testing.assert_allclose(frequencies(64, 1e4), expected, rtol=1e-12)


def test_scaled_frequencies_are_those_of_llama_3_1():
    plain = frequencies(128, 5e5)
    scaled = frequencies(128, 5e5, RotaryScaling())
    np.testing.assert_allclose(scaled, [_llama_3_1(frequency) for frequency in plain], rtol=1e-12)
    kept, low = (np.isclose(scaled, np.array(plain) / factor, rtol=1e-9) for factor in (1, 8))
    assert kept.any()
    assert low.any()
    assert not (kept | low).all()
    # From transformers 5.23.0, LlamaRotaryEmbedding of Llama 3.1, in float32.
    np.testing.assert_allclose(scaled[1:3], [0.8146172, 0.6636013], rtol=1e-6)
    np.testing.assert_allclose(scaled[-3:], [4.6246538e-07, 3.7673226e-07, 3.0689259e-07], rtol=1e-6)


def test_yarn_keeps_the_frequencies_of_its_first_planes_and_divides_those_of_its_last():
    """gpt-oss: theta 150000, factor 32, 4096 positions, planes between not rounded."""
    scaling = RotaryScaling("yarn", 32.0, original_max_position=4096, truncate=False)
    plain = np.array(frequencies(64, 150000.0))
    scaled = np.array(frequencies(64, 150000.0, scaling))
    # The planes that turn 32 times and once in 4096 positions: 64 ln(4096 / (2 pi turns)) / (2 ln 150000).
    first, last = 8.09, 17.40
    np.testing.assert_allclose(scaled[:9], plain[:9], rtol=1e-12)
    np.testing.assert_allclose(scaled[18:], plain[18:] / 32, rtol=1e-12)
    divided = (np.arange(9, 18) - first) / (last - first)
    np.testing.assert_allclose(scaled[9:18], plain[9:18] * (1 - divided + divided / 32), rtol=2e-2)
    assert scaling.amplitude == pytest.approx(0.1 * math.log(32) + 1)


def test_a_rotation_with_an_amplitude_and_its_gradient_are_multiplied_by_it():
    x = _normal(2, 5, 3, 16)
    table = frequencies(16, 1e4)
    plain, transposed = jax.vjp(partial(rotate, frequencies=table), x)
    larger, of_larger = jax.vjp(partial(rotate, frequencies=table, amplitude=1.5), x)
    np.testing.assert_allclose(larger, 1.5 * plain, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_larger(plain)[0], 1.5 * transposed(plain)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scaling", [None, RotaryScaling(original_max_position=64)])
def test_planes_turn_by_position_times_frequency(scaling):
    table = frequencies(16, 1e4, scaling)
    x = _normal(2, 33, 3, 16)
    angles = np.arange(33)[:, None] * np.array(table)
    np.testing.assert_allclose(
        jax.jit(rotate, static_argnames="frequencies")(x, frequencies=table), _rotated(x, angles), atol=1e-5
    )


def test_scores_depend_on_the_distance_alone():
    table = frequencies(16, 1e4)
    query, key = _normal(2, 1, 1, 1, 16)
    query, key = (np.asarray(rotate(jnp.tile(x, (1, 20, 1, 1)), frequencies=table))[0, :, 0] for x in (query, key))
    scores = query @ key.T
    np.testing.assert_allclose(scores[7:, 4:17].diagonal(), scores[3, 0], rtol=1e-4)
    assert not np.allclose(scores[3, 0], scores[3, 1], rtol=1e-2)


def test_the_gradient_is_that_of_the_plain_formula_and_nothing_is_saved():
    table = frequencies(8, 1e4)
    x, weight = _normal(2, 2, 9, 3, 8)

    def plain(x):
        angle = jnp.arange(9.0)[:, None, None] * jnp.array(table)
        first, second = x[..., :4], x[..., 4:]
        turned = (first * jnp.cos(angle) - second * jnp.sin(angle), first * jnp.sin(angle) + second * jnp.cos(angle))
        return jnp.concatenate(turned, axis=-1)

    y, vjp = jax.vjp(jax.jit(partial(rotate, frequencies=table)), x)
    reference, reference_vjp = jax.vjp(jax.jit(plain), x)
    np.testing.assert_allclose(y, reference, atol=1e-5)
    np.testing.assert_allclose(vjp(weight)[0], reference_vjp(weight)[0], atol=1e-5)
    assert jax.tree.leaves(vjp.opaque_residuals) == []
    assert not hasattr(vjp.args_res[0], "shape")


def test_low_precision_is_turned_in_float32():
    table = frequencies(8, 1e4)
    x = jnp.array(_normal(1, 300, 2, 8), jnp.bfloat16)
    y = rotate(x, frequencies=table)
    assert y.dtype == jnp.bfloat16
    exact = _rotated(x.astype(jnp.float32), np.arange(300)[:, None] * np.array(table))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8, atol=1e-4)
