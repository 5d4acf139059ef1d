"""A vjp cut in two is the whole vjp, whatever backward needs of parameters and input, and keeps no parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.program import residuals

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KERNEL = jnp.linspace(-2.0, 2.0, 9).reshape(3, 3)
BIAS = jnp.arange(3.0)

# layer, its parameters, and how many arrays of which shape backward needs besides the parameters
CASES = {
    "input": (lambda p, x: x @ p, KERNEL, [(2, 3)]),
    "input, and a parameter that is not needed": (
        lambda p, x: x @ p["kernel"] + p["bias"],
        {"bias": BIAS, "kernel": KERNEL},
        [(2, 3)],
    ),
    "nested parameters": (lambda p, x: x @ p["a"][0] + p["b"][0], {"a": (KERNEL,), "b": [BIAS]}, [(2, 3)]),
    "nothing": (lambda p, x: x + p["bias"], {"bias": BIAS}, []),
    "an activation": (lambda p, x: jnp.exp(x) + p, BIAS, [(2, 3)]),
    "no parameters": (lambda p, x: jnp.exp(x), {}, [(2, 3)]),
    "an unused parameter": (lambda p, x: x @ p["kernel"], {"kernel": KERNEL, "unused": BIAS}, [(2, 3)]),
}


@pytest.mark.parametrize("what", CASES)
def test_forward_and_backward_are_the_whole_vjp(what):
    layer, params, shapes = CASES[what]
    y, kept = jax.jit(lambda p, x: residuals.forward(layer, p, x))(params, X)
    assert [leaf.shape for leaf in kept] == shapes
    # Other parameters than forward had: backward uses those that it is given, and none that forward kept.
    dy, x_like = jnp.cos(y), jax.ShapeDtypeStruct(X.shape, X.dtype)
    for scale in (1.0, 2.0):
        given = jax.tree.map(lambda leaf, scale=scale: scale * leaf, params)
        found = jax.jit(lambda p, kept, dy: residuals.backward(layer, p, kept, x_like, dy))(given, kept, dy)
        expected = jax.vjp(layer, given, X)[1](dy)
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
