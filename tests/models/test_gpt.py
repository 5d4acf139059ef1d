"""The model without a pipeline: its loss, its parts against plain forms, what its layer saves."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.models import GPT, GPTConfig
from jaxpipe.models.attention import xla
from jaxpipe.models.ends import token_loss_sum

CONFIG = GPTConfig(num_layers=3, hidden=16, num_heads=2, vocab_size=32, seq_len=8)


@functools.cache
def _init(model: GPT):
    return jax.jit(model.init)(jax.random.key(0))


def _batch(key: int = 0, *, num_valid_of_last: int = 8) -> dict:
    tokens = jax.random.randint(jax.random.key(key), (2, 9), 0, 32)
    targets = tokens[:, 1:].at[1, num_valid_of_last:].set(-1)
    return {"tokens": tokens[:, :-1], "targets": targets}


def _layer_params(model: GPT, dtype: str = "float32"):
    return jax.tree.map(lambda leaf: leaf[0].astype(dtype), _init(model)["layers"])


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_initial_loss_is_that_of_a_uniform_guess(tie_embeddings):
    model = GPT(dataclasses.replace(CONFIG, tie_embeddings=tie_embeddings, hidden=64))
    loss = jax.jit(model.loss_sum)(_init(model), _batch()) / 16
    # Logits start small but not at 0: a few tenths of a nat around log(vocab_size).
    assert abs(float(loss) - math.log(32)) < 0.7


def test_parameters_are_those_of_the_textbook():
    params = _init(GPT(dataclasses.replace(CONFIG, tie_embeddings=False)))
    h = 16
    per_layer = 2 * 2 * h + (3 * h * h + 3 * h) + (h * h + h) + (4 * h * h + 4 * h) + (4 * h * h + h)
    assert sum(leaf.size for leaf in jax.tree.leaves(params["layers"])) == 3 * per_layer
    assert sum(leaf.size for leaf in jax.tree.leaves(params["shared"])) == 32 * h + 8 * h + 2 * h + 32 * h


def test_layer_numbers_do_not_depend_on_how_many_layers_there_are():
    few = _init(GPT(CONFIG))["layers"]["up"]["kernel"]
    many = _init(GPT(dataclasses.replace(CONFIG, num_layers=5)))["layers"]["up"]["kernel"]
    np.testing.assert_array_equal(few, many[:3])
    assert not np.array_equal(many[0], many[1])


def test_loss_counts_only_valid_tokens():
    model = GPT(CONFIG)
    params = _init(model)
    whole, cut = (jax.jit(model.loss_sum)(params, _batch(num_valid_of_last=n)) for n in (8, 5))
    last = jax.tree.map(lambda leaf: leaf[1:], _batch())
    last["targets"] = last["targets"].at[:, :5].set(-1)
    np.testing.assert_allclose(whole - cut, model.loss_sum(params, last), rtol=1e-4)


def test_token_loss_is_the_log_probability():
    logits = jnp.array([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]])
    expected = -math.log(math.e**2 / (1 + math.e + math.e**2)) - math.log(math.e**3 / (math.e**3 + 2))
    np.testing.assert_allclose(token_loss_sum(logits, jnp.array([[2, 0]])), expected, rtol=1e-6)


def test_later_tokens_change_nothing_before_them():
    model = GPT(CONFIG)
    layer = _layer_params(model)
    x = jax.random.normal(jax.random.key(1), (1, 8, 16))
    apply = jax.jit(model.layer)
    before, changed = apply(layer, x), apply(layer, x.at[:, 5:].add(1.0))
    np.testing.assert_array_equal(changed[:, :5], before[:, :5])
    assert not np.allclose(changed[:, 5:], before[:, 5:])


def test_attention_and_its_gradients_are_those_of_jax_nn():
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, weight = (jax.random.normal(k, (2, 3, 8, 4)) for k in keys)

    def ours(q, k, v):
        return (xla(q, k, v) * weight).sum()

    def reference(q, k, v):
        swapped = (jnp.swapaxes(a, 1, 2) for a in (q, k, v))
        return (jnp.swapaxes(jax.nn.dot_product_attention(*swapped, is_causal=True), 1, 2) * weight).sum()

    for a, b in zip(
        jax.tree.leaves(jax.value_and_grad(ours, (0, 1, 2))(query, key, value)),
        jax.tree.leaves(jax.value_and_grad(reference, (0, 1, 2))(query, key, value)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_saves_its_matrix_inputs_and_no_weights(dtype):
    model = GPT(CONFIG)
    x = jnp.ones((2, 8, 16), dtype)
    _, backward = jax.vjp(model.layer, _layer_params(model, dtype), x)
    saved = jax.tree.leaves(backward.opaque_residuals)
    stream, heads, feed_forward, probabilities = (2, 8, 16), (2, 2, 8, 8), (2, 8, 64), (2, 2, 8, 8)
    # The two norms' outputs, the attended values and the middle of the stream; q, k, v; probabilities;
    # before and after GELU. `heads` and `probabilities` are of one shape here: seq = head_dim = 8.
    expected = [stream] * 4 + [heads] * 3 + [probabilities] + [feed_forward] * 2
    assert sorted(leaf.shape for leaf in saved) == sorted(expected)
    assert {str(leaf.dtype) for leaf in saved} == {dtype}


def test_recompute_saves_less_and_changes_no_gradient():
    x = jax.random.normal(jax.random.key(1), (2, 8, 16))
    num_saved, gradients = {}, {}
    for recompute in ("none", "attention", "full"):
        model = GPT(dataclasses.replace(CONFIG, recompute=recompute))
        params = _layer_params(model)
        _, backward = jax.vjp(jax.jit(model.layer), params, x)
        num_saved[recompute] = len(jax.tree.leaves(backward.opaque_residuals))
        gradients[recompute] = jax.jit(jax.grad(lambda p, x, layer=model.layer: jnp.sin(layer(p, x)).sum(), (0, 1)))(
            params, x
        )
    assert num_saved == {"none": 10, "attention": 9, "full": 0}
    for recompute in ("attention", "full"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
            gradients["none"],
            gradients[recompute],
        )


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden", 17, "model.hidden=16"),
        ("attention", "flash", "one of xla"),
        ("recompute", "ful", "Did you mean 'full'?"),
    ],
)
def test_bad_configs_are_refused_with_a_repair(field, value, words):
    with pytest.raises(ConfigError, match="repair: set") as error:
        dataclasses.replace(CONFIG, **{field: value})
    assert words in str(error.value)
