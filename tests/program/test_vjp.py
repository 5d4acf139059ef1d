"""A vjp cut in two is the whole vjp; it keeps no parameters, nothing given, nor what random numbers come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.mesh import Randomness
from jaxpipe.models.dropout import drop
from jaxpipe.program.vjp import trace_vjp

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
KERNEL = jnp.linspace(-2.0, 2.0, 9).reshape(3, 3)
BIAS = jnp.arange(3.0)


def random_of(seed: int) -> Randomness:
    return Randomness(jax.random.key_data(jax.random.key(seed)), jnp.int32(seed))


def uniform(random: Randomness) -> jax.Array:
    return jax.random.uniform(jax.random.wrap_key_data(random.words), X.shape)


def dropped(y: jax.Array, random: Randomness) -> jax.Array:
    return drop(y[None], random, rate=0.5, site=0, positions=jnp.arange)[0]


# layer, its parameters, and how many arrays of which shape backward needs besides parameters and random
CASES = {
    "input": (lambda p, x, r: x @ p, KERNEL, [(2, 3)]),
    "input, and a parameter that is not needed": (
        lambda p, x, r: x @ p["kernel"] + p["bias"],
        {"bias": BIAS, "kernel": KERNEL},
        [(2, 3)],
    ),
    "nested parameters": (lambda p, x, r: x @ p["a"][0] + p["b"][0], {"a": (KERNEL,), "b": [BIAS]}, [(2, 3)]),
    "nothing": (lambda p, x, r: x + p["bias"], {"bias": BIAS}, []),
    "an activation": (lambda p, x, r: jnp.exp(x) + p, BIAS, [(2, 3)]),
    "no parameters": (lambda p, x, r: jnp.exp(x), {}, [(2, 3)]),
    "an unused parameter": (lambda p, x, r: x @ p["kernel"], {"kernel": KERNEL, "unused": BIAS}, [(2, 3)]),
}
RANDOM_CASES = {
    "random numbers that are kept": (lambda p, x, r: x * uniform(r) + p, BIAS, [(2, 3)]),
    "random numbers that are drawn again": (lambda p, x, r: dropped(x + p, r), BIAS, []),
    "input, and random numbers that are drawn again": (lambda p, x, r: dropped(x @ p, r), KERNEL, [(2, 3)]),
}


def forward(layer, params, random):
    return jax.jit(trace_vjp(layer, params, X, random).forward)(params, X, random)


def backward(layer, params, kept, random, dy):
    return jax.jit(trace_vjp(layer, params, X, random).backward)(params, kept, dy, random)


def assert_vjp(found, layer, params, random, dy):
    expected = jax.vjp(lambda params, x: layer(params, x, random), params, X)[1](dy)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize(
    ("what", "random"),
    [
        *((what, None) for what in CASES),
        *((what, random_of(1)) for what in CASES),
        *((what, random_of(1)) for what in RANDOM_CASES),
    ],
    ids=[*CASES, *(f"{what}, and unused random" for what in CASES), *RANDOM_CASES],
)
def test_forward_and_backward_are_the_whole_vjp(what, random):
    layer, params, shapes = (CASES | RANDOM_CASES)[what]
    y, kept = forward(layer, params, random)
    np.testing.assert_allclose(y, layer(params, X, random), rtol=1e-6)
    assert [(leaf.shape, leaf.dtype) for leaf in kept] == [(shape, X.dtype) for shape in shapes]
    # Other parameters than forward had: backward uses those that it is given, and none that forward kept.
    dy = jnp.cos(y)
    for scale in (1.0, 2.0):
        given = jax.tree.map(lambda leaf, scale=scale: scale * leaf, params)
        assert_vjp(backward(layer, given, kept, random, dy), layer, given, random, dy)


def test_masks_are_drawn_from_the_key_that_backward_is_given():
    layer, params, _ = RANDOM_CASES["input, and random numbers that are drawn again"]
    y, kept = forward(layer, params, random_of(1))
    for other in (random_of(2), random_of(3)):
        assert np.any(np.asarray(layer(params, X, other)) != np.asarray(y))
        assert_vjp(backward(layer, params, kept, other, jnp.ones_like(y)), layer, params, other, jnp.ones_like(y))


@jax.custom_vjp
def masked(x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask == 1, x, 0.0)


masked.defvjp(lambda x, mask: (masked(x, mask), mask), lambda mask, dy: (masked(dy, mask), None))


def test_what_a_layer_reads_of_the_microbatch_is_not_kept():
    def layer(params, x, microbatch, random):
        return masked(x @ params, microbatch["mask"])

    microbatch = {"mask": jnp.array([[1], [0]]), "unused": jnp.zeros(5)}
    vjp = trace_vjp(layer, KERNEL, X, microbatch, None)
    y, kept = vjp.forward(KERNEL, X, microbatch, None)
    assert [leaf.shape for leaf in kept] == [X.shape]
    for mask in ([[1], [0]], [[0], [1]]):
        given = {**microbatch, "mask": jnp.array(mask)}
        found = vjp.backward(KERNEL, kept, y + 1, given, None)
        expected = jax.vjp(lambda params, x, given=given: layer(params, x, given, None), KERNEL, X)[1](y + 1)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@pytest.mark.parametrize("form", ["plain", "transposed", "checkpoint", "read twice"])
def test_a_wide_gradient_is_the_product_of_its_operands_without_rounding(form):
    def product(params, x):
        kernel = params["kernel"].T if form == "transposed" else params["kernel"]
        y = (x.reshape(-1, 4) @ kernel).reshape(2, 8, 4)
        return (y @ kernel).astype(x.dtype) if form == "read twice" else y

    generator = np.random.default_rng(0)
    x, dy = jnp.asarray(generator.standard_normal((2, 2, 8, 4)), "bfloat16")
    params = {"kernel": jnp.asarray(generator.standard_normal((4, 4)), "bfloat16")}
    layer = jax.checkpoint(product) if form == "checkpoint" else product
    narrow, wide = (trace_vjp(layer, params, x, wide=is_wide) for is_wide in (False, True))
    _, kept = narrow.forward(params, x)
    of_narrow, of_wide = (vjp.backward(params, kept, dy) for vjp in (narrow, wide))
    np.testing.assert_array_equal(of_narrow[1], of_wide[1])  # dx is as it was
    gradient = of_wide[0]["kernel"]
    # A sum of two gradients is no product: it stays as it was.
    assert gradient.dtype == ("bfloat16" if form == "read twice" else "float32")
    if form != "read twice":
        np.testing.assert_array_equal(gradient.astype("bfloat16"), of_narrow[0]["kernel"])
        exact = np.asarray(x, np.float64).reshape(-1, 4).T @ np.asarray(dy, np.float64).reshape(-1, 4)
        exact = exact.T if form == "transposed" else exact
        np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-5)
