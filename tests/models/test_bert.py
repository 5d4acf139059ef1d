"""BERT: its parameters, which tokens reach which, padding; its numbers are in `test_language_model`."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small_models import HIDDEN, NUM_LAYERS, SEQ, VOCAB_SIZE, config_of, masked_tokens, random_params

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import BertConfig, LanguageModel


@pytest.mark.parametrize("sentence_order", [True, False])
@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_parameters_of_the_ends_are_those_of_the_textbook(tie_embeddings, sentence_order):
    config = config_of("bert", tie_embeddings=tie_embeddings, sentence_order=sentence_order)
    shared = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))["shared"]
    h, norm = HIDDEN, {"scale": (HIDDEN,), "bias": (HIDDEN,)}
    dense = {"kernel": (h, h), "bias": (h,)}
    head: dict[str, Any] = {"norm": norm, "transform": dense, "transform_norm": norm, "bias": (VOCAB_SIZE,)}
    if not tie_embeddings:
        head["kernel"] = (VOCAB_SIZE, h)
    if sentence_order:
        head |= {"pooler": dense, "sentence_order": {"kernel": (h, 2), "bias": (2,)}}
    embedding = {"token": (VOCAB_SIZE, h), "position": (12, h), "token_type": (2, h)}
    assert jax.tree.map(lambda leaf: leaf.shape, shared) == {"embedding": embedding, "head": head}


def test_a_layer_has_the_parameters_of_gpt():
    layers = [jax.eval_shape(LanguageModel(config_of(f)).init, jax.random.key(0))["layers"] for f in ("bert", "gpt")]
    assert layers[0] == layers[1]


@cache
def _model_and_params(attention: str = "xla"):
    config = config_of("bert", attention=attention)
    return LanguageModel(config), random_params(config)


@cache
def _logits(attention: str = "xla"):
    model, params = _model_and_params(attention)
    return jax.jit(lambda batch: model.logits(params, batch))


@pytest.mark.parametrize("attention", ["xla", "chunked"])
def test_what_stands_in_padding_reaches_no_token(attention):
    batch = masked_tokens()
    padding = batch["padding_mask"] == 0
    other = batch | {
        "tokens": np.where(padding, 31 - batch["tokens"], batch["tokens"]),
        "token_types": np.where(padding, 1 - batch["token_types"], batch["token_types"]),
    }
    plain, changed = (_logits(attention)(given) for given in (batch, other))
    assert padding.any(axis=1).sum() == 2
    np.testing.assert_array_equal(changed["sentence_order"], plain["sentence_order"])
    np.testing.assert_array_equal(changed["masked_lm"][~padding], plain["masked_lm"][~padding])
    assert (changed["masked_lm"][padding] != plain["masked_lm"][padding]).any(axis=-1).all()  # it would be seen


def test_a_padded_sequence_is_as_the_shorter_one():
    batch = masked_tokens()
    short = jax.tree.map(lambda leaf: leaf[1:2, : SEQ - 3] if leaf.shape == (3, SEQ) else leaf[1:2], batch)
    assert short["padding_mask"].all()
    padded, alone = _logits()(batch), _logits()(short)
    np.testing.assert_allclose(padded["masked_lm"][1:2, : SEQ - 3], alone["masked_lm"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(padded["sentence_order"][1:2], alone["sentence_order"], rtol=1e-4, atol=1e-4)


def test_every_token_reaches_every_other():
    batch = masked_tokens()
    plain = _logits()(batch)["masked_lm"][0]
    for position in (0, SEQ - 1):
        tokens = batch["tokens"].copy()
        tokens[0, position] = (tokens[0, position] + 1) % VOCAB_SIZE
        assert (np.abs(_logits()(batch | {"tokens": tokens})["masked_lm"][0] - plain).max(axis=-1) > 1e-3).all()


@pytest.mark.ci
def test_places_that_are_not_valid_count_nothing():
    model, params = _model_and_params()
    loss = jax.jit(jax.value_and_grad(lambda params, batch: sum(model.loss_sum(params, batch).values())))
    batch = masked_tokens()
    not_valid = batch["targets"] < 0
    other = batch | {"predicted": np.where(not_valid, 8, batch["predicted"])}
    assert not_valid.any()
    for a, b in zip(*(jax.tree.leaves(loss(params, given)) for given in (batch, other)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_the_order_counts_once_on_several_devices():
    """All devices compute it; without `TensorAxis.once` its gradient would be as many times too large."""
    model, params = _model_and_params()
    split, batch = LanguageModel(model.config, TensorAxis(2)), masked_tokens()
    x = np.random.default_rng(0).standard_normal((3, SEQ, HIDDEN), np.float32)

    def gradient(model):
        return jax.grad(lambda shared, x: model.head(shared, x, batch)["sentence_order"])

    def on_device(shared, x):
        found = gradient(split)(shared, x)["head"]
        return jax.lax.psum((found["pooler"], found["sentence_order"]), "tensor")

    on_devices = jax.shard_map(
        on_device,
        mesh=make_mesh(tensor=2),
        in_specs=(split.specs["shared"], P(None, "tensor")),
        out_specs=P(),
        check_vma=False,
    )
    expected = jax.jit(gradient(model))(params["shared"], x)["head"]
    found = jax.jit(on_devices)(params["shared"], x)
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves((expected["pooler"], expected["sentence_order"])), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_single_token_type_is_that_of_both_segments():
    sizes: dict[str, Any] = {"num_layers": 1, "hidden": 8, "num_heads": 2, "vocab_size": 9, "num_positions": SEQ}
    model = LanguageModel(BertConfig(**sizes, num_token_types=1, sentence_order=False))
    batch, shared = masked_tokens(), model.init(jax.random.key(0))["shared"]
    assert batch["token_types"].max() == 1
    vjp = jax.jit(lambda shared: jax.vjp(lambda shared: model.embed(shared, batch, None), shared)[1](ones)[0])
    ones = jnp.ones((*batch["tokens"].shape, 8))
    gradient = vjp(shared)["embedding"]["token_type"]
    np.testing.assert_allclose(gradient, np.full((1, 8), batch["tokens"].size), rtol=1e-6)


def test_two_segments_need_two_token_types():
    sizes: dict[str, Any] = {"num_layers": NUM_LAYERS, "hidden": 8, "num_heads": 2, "vocab_size": 9, "num_positions": 4}
    BertConfig(**sizes, num_token_types=1, sentence_order=False)
    with pytest.raises(ConfigError, match=r"rule token-types: (.|\n)* repair: set model.num_token_types=2"):
        BertConfig(**sizes, num_token_types=1)
