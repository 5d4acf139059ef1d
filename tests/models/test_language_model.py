"""A whole model without a pipeline: loss and gradients against plain autodiff of the textbook's, with dropout too."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textbook
from jax.sharding import PartitionSpec as P
from small_models import (
    BATCH,
    CONFIGS,
    DROPOUT,
    HIDDEN,
    KEY,
    NUM_HEADS,
    NUM_LAYERS,
    SEQ,
    VOCAB_SIZE,
    assert_near,
    config_of,
    random_params,
    randomness,
    tokens_and_targets,
)

from jaxpipe.models import LanguageModel
from jaxpipe.models.dropout import Site, keep_mask

FAMILIES = pytest.mark.parametrize("family", CONFIGS)
MICROBATCH, FIRST_SEQUENCE = 2, 5


def _init(config):
    return jax.jit(LanguageModel(config).init)(jax.random.key(0))


@FAMILIES
@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_the_gradient_is_that_of_the_textbook(family, tie_embeddings):
    config = config_of(family, tie_embeddings=tie_embeddings)
    params, batch = random_params(config), tokens_and_targets()
    ours = jax.jit(jax.value_and_grad(LanguageModel(config).loss_sum))(params, batch)
    assert_near(ours, jax.jit(jax.value_and_grad(partial(textbook.loss_sum, family, config)))(params, batch))


def _drops(key: jax.Array, batch: int, seq: int) -> list:
    """The textbook's `drop` for the embedding and each layer: rows and rates of the masks, written out."""
    rates = {
        "embedding": (Site.EMBEDDING, DROPOUT["embedding_dropout"]),
        "probabilities": (Site.ATTENTION_PROBABILITIES, DROPOUT["attention_dropout"]),
        "attention": (Site.ATTENTION_OUTPUT, DROPOUT["hidden_dropout"]),
        "feed_forward": (Site.FEED_FORWARD_OUTPUT, DROPOUT["hidden_dropout"]),
    }
    sequence, head, position = np.ogrid[FIRST_SEQUENCE : FIRST_SEQUENCE + batch, :NUM_HEADS, :seq]
    of_stream, of_heads = (sequence * 2**20 + position)[:, 0], (sequence * NUM_HEADS + head) * seq + position

    def drop(key, name, x):
        site, rate = rates[name]
        rows = jnp.asarray(of_heads if name == "probabilities" else of_stream)
        mask = keep_mask(key, site=site, rows=rows, num_columns=x.shape[-1], rate=rate)
        return jnp.where(mask, x / (1 - rate), 0.0)

    # The key of a step, folded with the microbatch and then with 0 for the embedding, 1 for the first layer ...
    of_microbatch = jax.random.fold_in(jax.random.wrap_key_data(key), MICROBATCH)
    keys = [jax.random.key_data(jax.random.fold_in(of_microbatch, i)) for i in range(1 + NUM_LAYERS)]
    return [partial(drop, key) for key in keys]


@pytest.mark.parametrize(
    "form", [{}, {"attention": "chunked"}, {"recompute": "full"}], ids=lambda form: " ".join(form.values()) or "xla"
)
def test_the_gradient_with_dropout_is_that_of_the_textbook_with_the_same_masks(form):
    config = config_of("gpt", **DROPOUT, **form)
    params, batch = random_params(config), tokens_and_targets()

    def loss(params, random):
        return LanguageModel(config).loss_sum(params, batch, random, MICROBATCH)

    found = jax.jit(jax.value_and_grad(loss))(params, randomness(FIRST_SEQUENCE))
    assert_near(found, _textbook_with_dropout())
    # Nothing dropped, as in evaluation, or other masks, are far off.
    for random in (None, randomness(FIRST_SEQUENCE + 1)):
        assert abs(float(jax.jit(loss)(params, random) - found[0])) > 0.01 * float(found[0])


@cache
def _textbook_with_dropout():
    config = config_of("gpt", **DROPOUT)
    batch, drops = tokens_and_targets(), _drops(KEY, BATCH, SEQ)
    loss = partial(textbook.loss_sum, "gpt", config, batch=batch, drops=drops)
    return jax.jit(jax.value_and_grad(loss))(random_params(config))


@FAMILIES
@pytest.mark.parametrize("tie_embeddings", [True, False], ids=["tied", "untied"])
def test_the_initial_loss_is_that_of_a_uniform_guess(family, tie_embeddings):
    config = config_of(family, tie_embeddings=tie_embeddings, hidden=64)
    batch = tokens_and_targets()
    loss = jax.jit(LanguageModel(config).loss_sum)(_init(config), batch) / (batch["targets"] >= 0).sum()
    # Logits start small but not at 0: a few tenths of a nat around log(vocab_size).
    assert abs(float(loss) - math.log(VOCAB_SIZE)) < 0.7


@FAMILIES
def test_numbers_of_a_layer_do_not_depend_on_how_many_layers_there_are(family):
    few, many = (_init(config_of(family, num_layers=n))["layers"]["feed_forward"]["up"]["kernel"] for n in (2, 5))
    np.testing.assert_array_equal(few, many[:2])
    assert not np.array_equal(many[0], many[1])


@FAMILIES
def test_specs_split_heads_columns_and_words(family):
    specs = LanguageModel(config_of(family, tie_embeddings=False)).specs
    params = jax.eval_shape(LanguageModel(config_of(family, tie_embeddings=False)).init, jax.random.key(0))
    assert jax.tree.structure(specs) == jax.tree.structure(params)
    split = {
        jax.tree_util.keystr(path, simple=True, separator="."): spec
        for path, spec in jax.tree_util.tree_leaves_with_path(specs)
        if spec != P()
    }
    into = [f"feed_forward.{name}" for name in (["gate", "up"] if family == "llama" else ["up"])]
    into.append("attention.query_key_value")
    columns = {f"layers.{name}.kernel": P(None, "tensor") for name in into}
    biases = {f"layers.{name}.bias": P("tensor") for name in into if family == "gpt"}
    rows = {f"layers.{name}.kernel": P("tensor") for name in ("attention.output", "feed_forward.down")}
    words = {"shared.embedding.token": P("tensor"), "shared.head.kernel": P("tensor")}
    assert split == columns | biases | rows | words


def test_positions_are_learned_by_gpt_and_turned_by_llama():
    """Without its positions a layer of no mask would be blind to order; here a swap of two tokens is seen."""
    for family in CONFIGS:
        config = config_of(family)
        params, batch = random_params(config), tokens_and_targets()
        swapped = batch | {"tokens": batch["tokens"][:, [1, 0, *range(2, SEQ)]]}
        # Only the last target counts: it sees the same tokens, in another order.
        last = np.full((BATCH, SEQ), -1, np.int32)
        last[:, -1] = 3
        loss = jax.jit(LanguageModel(config).loss_sum)
        assert abs(float(loss(params, batch | {"targets": last}) - loss(params, swapped | {"targets": last}))) > 1e-3
    assert params["shared"]["embedding"].keys() == {"token"}
    assert random_params(config_of("gpt"))["shared"]["embedding"]["position"].shape == (12, HIDDEN)
