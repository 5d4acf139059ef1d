"""Layer norm and RMS norm against their formulas, values and gradients, and their precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textbook
from small_models import assert_near, normal

from jaxpipe.models.linear import LayerNorm, RMSNorm

HIDDEN = 24
NORMS = {
    "layer": (LayerNorm(HIDDEN, epsilon=1e-5), textbook.layer_norm),
    "rms": (RMSNorm(HIDDEN, epsilon=1e-2), lambda x, arrays: textbook.rms_norm(x, arrays, 1e-2)),
}


def _arrays(norm):
    return {name: 1 + normal(HIDDEN, seed=i) for i, name in enumerate(norm.arrays())}


@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients_are_those_of_the_formula(name):
    norm, formula = NORMS[name]
    # A mean of 2: layer norm takes it off, RMS norm does not.
    x, dy = 2 + normal(3, 5, HIDDEN), normal(3, 5, HIDDEN, seed=2)

    def value_and_gradients(function):
        y, vjp = jax.vjp(function, x, _arrays(norm))
        return y, vjp(dy)

    assert_near(value_and_gradients(norm.apply), value_and_gradients(formula))


def test_a_new_norm_leaves_the_scale_of_what_is_normal():
    assert {name: float(array.mean()) for name, array in LayerNorm(HIDDEN).arrays().items()} == {"scale": 1, "bias": 0}
    assert {name: float(array.mean()) for name, array in RMSNorm(HIDDEN).arrays().items()} == {"scale": 1}


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_low_precision_are_taken_in_float32(name):
    norm, formula = NORMS[name]
    x = jnp.asarray(20 + normal(3, 5, HIDDEN), jnp.bfloat16)
    arrays = jax.tree.map(lambda array: jnp.asarray(array, jnp.bfloat16), _arrays(norm))
    y = norm.apply(x, arrays)
    assert y.dtype == jnp.bfloat16
    exact = formula(*jax.tree.map(lambda array: array.astype(jnp.float32), (x, arrays)))
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-8, atol=2**-8)  # bfloat16 has 8 bits
