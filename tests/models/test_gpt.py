"""GPT's config: how many parameters it asks for, how they begin, and what it refuses."""

import jax
import numpy as np
import pytest
from small_models import HIDDEN, NUM_LAYERS, VOCAB_SIZE, config_of

from jaxpipe.errors import ConfigError
from jaxpipe.models import LanguageModel


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_parameters_are_those_of_the_textbook(tie_embeddings):
    config = config_of("gpt", tie_embeddings=tie_embeddings)
    params = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))
    h = HIDDEN
    per_layer = 2 * 2 * h + (3 * h * h + 3 * h) + (h * h + h) + (4 * h * h + 4 * h) + (4 * h * h + h)
    assert sum(leaf.size for leaf in jax.tree.leaves(params["layers"])) == NUM_LAYERS * per_layer
    tables = VOCAB_SIZE * h * (1 if tie_embeddings else 2) + 12 * h
    assert sum(leaf.size for leaf in jax.tree.leaves(params["shared"])) == tables + 2 * h


@pytest.mark.ci
def test_products_back_to_the_stream_begin_smaller():
    """By sqrt(2 * num_layers): Radford et al. 2019, section 2.3."""
    model = LanguageModel(config_of("gpt", hidden=128, num_layers=8))
    layers = jax.jit(model.init)(jax.random.key(0))["layers"]
    deviations = {name: float(np.std(layers["feed_forward"][name]["kernel"])) for name in ("up", "down")}
    assert deviations["up"] == pytest.approx((2 / (5 * 128)) ** 0.5, rel=0.02)
    assert deviations["down"] == pytest.approx(deviations["up"] / 4, rel=0.02)


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, False),
        ({"embedding_dropout": 0.1}, True),
        ({"attention_dropout": 0.1}, True),
        ({"hidden_dropout": 0.1}, True),
    ],
)
def test_a_config_says_whether_it_drops_anything(rates, expected):
    assert config_of("gpt", **rates).anatomy.has_dropout == expected


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 25}, "set model.hidden=24 (the nearest below) or 28"),
        ({"hidden": 3}, "set model.hidden=4"),
        ({"attention": "flash"}, "one of xla"),
        ({"recompute": "ful"}, "Did you mean 'full'?"),
        ({"recompute": "attention", "attention": "chunked"}, "rule recompute-attention"),
        ({"recompute": "attention", "attention": "cudnn"}, "set model.recompute='none'"),
    ],
)
def test_bad_configs_are_refused_with_a_repair(family, changes, words):
    with pytest.raises(ConfigError, match="repair: set") as error:
        config_of(family, **changes)
    assert words in str(error.value)
