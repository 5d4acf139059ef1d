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
    KEY,
    NUM_HEADS,
    NUM_LAYERS,
    SEQ,
    VOCAB_SIZE,
    assert_near,
    batch_of,
    config_of,
    in_tiers,
    random_params,
    randomness,
    tokens_and_targets,
    total,
)

from jaxpipe.models import LanguageModel
from jaxpipe.models.dropout import Site, keep_mask
from jaxpipe.models.rotary import RotaryScaling

FAMILIES = pytest.mark.parametrize("family", CONFIGS)
MICROBATCH, FIRST_SEQUENCE = 2, 5


CASES = {
    "gpt untied": ("gpt", {"tie_embeddings": False}),
    "gpt of other choices": (
        "gpt",
        {"feed_forward": 40, "activation": "relu", "norm_epsilon": 1e-2, "vocab_size": 29, "vocab_multiple": 8},
    ),
    "bert untied": ("bert", {"tie_embeddings": False, "vocab_size": 32, "vocab_multiple": 5}),
    "bert of words alone": (
        "bert",
        {"sentence_order": False, "activation": "gelu_tanh", "norm_epsilon": 1e-2, "attention": "chunked"},
    ),
    "llama": ("llama", {}),
    "llama of other choices": (
        "llama",
        {
            "head_size": 10,
            "query_key_value_bias": True,
            "output_bias": True,
            "feed_forward_bias": True,
            "sliding_window": 3,
            "rope_scaling": RotaryScaling(kind="linear", factor=2.5),
            "tie_embeddings": True,
        },
    ),
}


@pytest.mark.parametrize("case", in_tiers(CASES, default=["bert untied"]))
def test_the_gradient_is_that_of_the_textbook(case):
    family, changes = CASES[case]
    config = config_of(family, **changes)
    params, batch = random_params(config), batch_of(family)
    batch["tokens"] %= config.vocab_size
    batch["targets"] = np.minimum(batch["targets"], config.vocab_size - 1)

    def objective(loss_sum):
        return jax.jit(jax.value_and_grad(lambda params: total(loss_sum(params, batch))))(params)

    assert_near(objective(LanguageModel(config).loss_sum), objective(partial(textbook.loss_sum, family, config)))
    found = jax.jit(LanguageModel(config).logits)(params, batch)
    assert_near(found, jax.jit(partial(textbook.logits, family, config))(params, batch))


@FAMILIES
def test_losses_are_counted_over_any_number_of_dims(family):
    batch = batch_of(family)
    num_targets = sum(target >= 0 for target in batch["targets"].flat)
    expected = {"masked_lm": num_targets, "sentence_order": 2} if family == "bert" else num_targets
    model = LanguageModel(config_of(family))
    assert model.num_losses(batch) == expected
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf])[:, None], batch)
    found = model.num_losses(stacked)
    assert found == jax.tree.map(lambda count: 2 * count, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("int32")}


def _drops() -> list:
    """The textbook's `drop` for the embedding and each layer: rows and rates of the masks, written out."""
    draw = jax.jit(keep_mask, static_argnames=("site", "num_columns", "rate"))
    rates = {
        "embedding": (Site.EMBEDDING, DROPOUT["embedding_dropout"]),
        "probabilities": (Site.ATTENTION_PROBABILITIES, DROPOUT["attention_dropout"]),
        "attention": (Site.ATTENTION_OUTPUT, DROPOUT["hidden_dropout"]),
        "feed_forward": (Site.FEED_FORWARD_OUTPUT, DROPOUT["hidden_dropout"]),
    }
    sequence, head, position = np.ogrid[FIRST_SEQUENCE : FIRST_SEQUENCE + BATCH, :NUM_HEADS, :SEQ]
    of_stream, of_heads = (sequence * 2**20 + position)[:, 0], (sequence * NUM_HEADS + head) * SEQ + position

    def drop(key, name, x):
        site, rate = rates[name]
        rows = jnp.asarray(of_heads if name == "probabilities" else of_stream)
        mask = draw(key, site=site, rows=rows, num_columns=x.shape[-1], rate=rate)
        return jnp.where(mask, x / (1 - rate), 0.0)

    # The key of the step, folded with the microbatch and then with 0 for the embedding, 1 for the first layer ...
    of_microbatch = jax.random.fold_in(jax.random.wrap_key_data(KEY), MICROBATCH)
    return [partial(drop, jax.random.key_data(jax.random.fold_in(of_microbatch, i))) for i in range(1 + NUM_LAYERS)]


@pytest.mark.parametrize(
    ("family", "form"),
    in_tiers(
        [("gpt", {}), ("gpt", {"attention": "chunked", "recompute": "full"}), ("bert", {"attention": "chunked"})],
        default=[],
    ),
    ids=["xla", "chunked full", "bert chunked"],
)
def test_the_gradient_with_dropout_is_that_of_the_textbook_with_the_same_masks(family, form):
    config = config_of(family, **DROPOUT, **form)
    params, batch = random_params(config), batch_of(family)

    def loss(params, random):
        return total(LanguageModel(config).loss_sum(params, batch, random, MICROBATCH))

    found = jax.jit(jax.value_and_grad(loss))(params, randomness(FIRST_SEQUENCE))
    assert_near(found, _textbook_with_dropout(family))


def test_other_masks_would_be_seen():
    params, batch = random_params(config_of("gpt")), tokens_and_targets()
    loss = jax.jit(partial(LanguageModel(config_of("gpt", **DROPOUT)).loss_sum, params, batch))
    same, *others = (
        loss(random, microbatch)
        for random, microbatch in (
            (randomness(FIRST_SEQUENCE), MICROBATCH),
            (randomness(FIRST_SEQUENCE), MICROBATCH + 1),
            (randomness(FIRST_SEQUENCE + 1), MICROBATCH),
            (None, MICROBATCH),
        )
    )
    expected = float(_textbook_with_dropout("gpt")[0])
    # A hundred times the tolerance of the test above.
    assert abs(same - expected) < 1e-5 * expected
    assert all(abs(other - expected) > 1e-3 * expected for other in others)


@cache
def _textbook_with_dropout(family: str):
    config, batch, drops = config_of(family, **DROPOUT), batch_of(family), _drops()

    def loss(params):
        return total(textbook.loss_sum(family, config, params, batch, drops))

    return jax.jit(jax.value_and_grad(loss))(random_params(config))


@cache
def _init(family: str, num_layers: int):
    config = config_of(family, num_layers=num_layers, hidden=64)
    return config, jax.jit(LanguageModel(config).init)(jax.random.key(0))


@pytest.mark.parametrize("family", in_tiers(CONFIGS, default=["llama"]))
def test_the_initial_loss_is_that_of_a_uniform_guess(family):
    config, params = _init(family, 2)
    batch, model = batch_of(family), LanguageModel(config)
    losses = jax.tree.map(jnp.divide, jax.jit(model.loss_sum)(params, batch), model.num_losses(batch))
    guesses = {"masked_lm": math.log(VOCAB_SIZE), "sentence_order": math.log(2)}
    # Logits start small but not at 0: a few tenths of a nat around the guess.
    for found, expected in zip(
        jax.tree.leaves(losses), guesses.values() if family == "bert" else [math.log(VOCAB_SIZE)], strict=True
    ):
        assert abs(float(found) - expected) < 0.7


@pytest.mark.ci
def test_numbers_of_a_layer_do_not_depend_on_how_many_layers_there_are():
    few, many = (_init("gpt", n)[1]["layers"]["feed_forward"]["up"]["kernel"] for n in (2, 3))
    np.testing.assert_array_equal(few, many[:2])
    assert not np.array_equal(many[0], many[1])


@pytest.mark.ci
def test_rows_beyond_the_words_begin_as_zeros_and_leave_the_others_as_they_are():
    plain, padded = (
        jax.jit(LanguageModel(config_of("bert", tie_embeddings=False, vocab_size=29, vocab_multiple=multiple)).init)(
            jax.random.key(0)
        )["shared"]
        for multiple in (1, 8)
    )
    for find in (lambda shared: shared["embedding"]["token"], lambda shared: shared["head"]["kernel"]):
        np.testing.assert_array_equal(find(padded)[:29], find(plain))
        np.testing.assert_array_equal(find(padded)[29:], np.zeros_like(find(padded)[29:]))


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
    biases = {f"layers.{name}.bias": P("tensor") for name in into if family != "llama"}
    biases |= {"shared.head.bias": P("tensor")} if family == "bert" else {}
    rows = {f"layers.{name}.kernel": P("tensor") for name in ("attention.output", "feed_forward.down")}
    words = {"shared.embedding.token": P("tensor"), "shared.head.kernel": P("tensor")}
    assert split == columns | biases | rows | words


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_order_of_earlier_tokens_matters(family):
    """Attention itself sees a set of them: without positions, the last token could not tell."""
    config = config_of(family, num_layers=1)
    params, batch = random_params(config), tokens_and_targets()
    swapped = batch["tokens"][:, [1, 0, *range(2, SEQ)]]
    targets = np.full((BATCH, SEQ), -1, np.int32)
    targets[:, -1] = 3
    loss = jax.jit(LanguageModel(config).loss_sum)
    one, other = (loss(params, {"tokens": tokens, "targets": targets}) for tokens in (batch["tokens"], swapped))
    assert abs(one - other) > 1e-3 * one
