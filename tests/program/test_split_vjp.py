"""I and W of any layer together are its backward: the same numbers by the same products, nothing computed anew."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jaxprs import num_products, num_runs
from layers_to_split import LAYERS, X, normal
from split_functions import ONCE, SplitFunctions, split_functions
from tiers import tiers

from jaxpipe.program.vjp import LayerVjp, trace_vjp

# Of a gradient's norm: float32 rounds to 6e-8, and XLA sums a forward and its backward in one program in other orders.
LARGEST_ERROR = 1e-6
QUICK = ["one product", "a kernel used twice", "checkpoint", "custom_vjp in a checkpoint", "a loop", "dropout"]
every_layer = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def arguments_of(name: str) -> tuple[Any, ...]:
    """Parameters, input, output's gradient, and what is given, of which integers have no gradient."""
    layer = LAYERS[name]
    params = jax.tree.map(lambda leaf: leaf.astype(layer.dtype), layer.params)
    return params, normal(*X).astype(layer.dtype), (normal(*X) ** 2).astype(layer.dtype), layer.given


@functools.cache
def vjp_of(name: str) -> LayerVjp:
    params, x, _, given = arguments_of(name)
    return trace_vjp(LAYERS[name].function, params, x, given)


@functools.cache
def split_of(name: str) -> SplitFunctions:
    return split_functions(vjp_of(name))


def in_float64(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


OTHERS = [name for name in LAYERS if name not in QUICK]


@pytest.mark.parametrize("name", tiers(QUICK, ci=OTHERS[::2], slow=OTHERS[1::2]))
def test_the_gradients_are_those_of_the_whole_backward(name):
    (params, x, dy, given), parts = arguments_of(name), split_of(name)
    function = LAYERS[name].function

    @functools.partial(jax.jit)
    def plain(params, x, dy):
        _, vjp = jax.vjp(lambda params, x: function(params, x, given), params, x)
        return vjp_of(name).forward(params, x, given)[1], vjp(dy)

    kept, expected = plain(params, x, dy)
    whole = jax.jit(parts.whole)(params, kept, dy, given)
    found = jax.jit(parts.both)(params, kept, dy, given)
    # Of a loop that is two, XLA orders the terms of a product in another way.
    if "loop" not in name:
        jax.tree.map(np.testing.assert_array_equal, found, whole)
    for reference in (whole, expected):
        for leaf, wanted in zip(in_float64(found), in_float64(reference), strict=True):
            assert np.linalg.norm(leaf - wanted) <= LARGEST_ERROR * np.linalg.norm(wanted)


@every_layer
def test_each_product_is_computed_once_and_nothing_drawn_anew(name):
    (params, _, dy, given), parts, layer, kept = (
        arguments_of(name),
        split_of(name),
        LAYERS[name],
        list(vjp_of(name).residuals),
    )
    now = num_runs(parts.input_gradient, params, kept, dy, given)
    later = num_runs(parts.weight_gradient, params, kept, list(parts.split.deferred), given)
    assert (num_products(now), num_products(later)) == (layer.now, layer.later)
    whole = num_runs(parts.whole, params, kept, dy, given)
    assert num_products(whole) == layer.now + layer.later
    assert [name for name in ONCE if now[name] + later[name] > whole[name]] == []


@every_layer
def test_what_i_defers_and_which_residuals_w_reads(name):
    parts, layer, kept = split_of(name), LAYERS[name], list(vjp_of(name).residuals)
    names = sorted(layer.params)  # the order of a dict's leaves
    assert {key for key, is_early in zip(names, parts.is_early, strict=True) if is_early} == set(layer.early)
    if layer.deferred is not None:
        assert sorted(like.shape for like in parts.split.deferred) == sorted(layer.deferred)
    if layer.shared is not None:
        assert sorted(kept[i].shape for i in parts.split.shared_with_w) == sorted(layer.shared)


@pytest.mark.parametrize("name", ["two products", "checkpoint", "gelu"])
def test_gigabytes_are_cut_as_bytes_are(name):
    """Their sums do not fit in 32 bits; nothing of that size is computed."""
    layer, found = LAYERS[name], []
    for factor in (1, 2**26):
        x = jax.ShapeDtypeStruct((factor * X[0], X[1]), layer.dtype)
        vjp = trace_vjp(layer.function, layer.params, x, None)
        kept, split = vjp.residuals, split_functions(vjp).split
        num_numbers = [like.size // factor for like in (*split.deferred, *(kept[i] for i in split.shared_with_w))]
        found.append((split.shared_with_w, num_numbers))
    assert found[0] == found[1]
