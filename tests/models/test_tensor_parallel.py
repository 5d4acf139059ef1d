"""Embedding, layer and head over a `tensor` axis against one device: values, gradients, masks, pieces in order.

Each device calls the functions with its part of everything, as the program does. A gradient of a parameter
that is not split is summed over the devices, as the contract of `StageFunctions` says.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from small_models import (
    BATCH,
    DROPOUT,
    HIDDEN,
    SEQ,
    VOCAB_SIZE,
    assert_near,
    batch_of,
    config_of,
    first_layer,
    in_tiers,
    masked_tokens,
    normal,
    random_params,
    randomness,
    stream,
    tokens_and_targets,
    total,
)

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel

PIECES = P(None, "tensor")  # of the stream "batch seq hidden"
CASES = {
    "gpt": ("gpt", {"tie_embeddings": False}, TensorAxis(2)),
    "gpt dropout": ("gpt", DROPOUT, TensorAxis(2)),
    "gpt dropout chunked full": ("gpt", {**DROPOUT, "attention": "chunked", "recompute": "full"}, TensorAxis(2)),
    "gpt deterministic": ("gpt", {"recompute": "attention"}, TensorAxis(2, deterministic=True)),
    "llama": ("llama", {}, TensorAxis(2)),
    "llama of other choices": (
        "llama",
        {"head_size": 10, "query_key_value_bias": True, "output_bias": True, "feed_forward_bias": True},
        TensorAxis(2),
    ),
    "bert dropout": ("bert", DROPOUT, TensorAxis(2)),
    "bert": ("bert", {"tie_embeddings": False, "attention": "chunked"}, TensorAxis(2)),
    "llama chunked": ("llama", {"attention": "chunked"}, TensorAxis(2)),
}


def _model_and_random(case: str, tensor: TensorAxis):
    family, changes, _ = CASES[case]
    config = config_of(family, **changes)
    return LanguageModel(config, tensor), randomness(first_sequence=5) if config.anatomy.has_dropout else None


def _value_and_gradients(function, weight, params, *x):
    """`function(params, *x)`, and the gradients of its sum with `weight`."""
    y, vjp = jax.vjp(function, params, *x)
    return y, vjp(weight)


def _over_devices(tensor: TensorAxis, function, specs, weight, params, *x, y_spec: P = PIECES):
    """`_value_and_gradients` with `params` split as `specs` say, `x` and `y` in pieces of the sequence."""

    def on_device(weight, params, *x):
        y, (d_params, *dx) = _value_and_gradients(function, weight, params, *x)
        is_split = jax.tree.map(lambda spec: "tensor" in spec, specs)
        summed = jax.tree.map(lambda d, split: d if split else jax.lax.psum(d, "tensor"), d_params, is_split)
        return y, (summed, *dx)

    pieces = (PIECES,) * len(x)
    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=make_mesh(tensor=tensor.size),
            in_specs=(y_spec, specs, *pieces),
            out_specs=(y_spec, (specs, *pieces)),
            check_vma=False,
        )
    )(weight, params, *x)


@pytest.mark.parametrize("case", in_tiers(CASES, default=["llama of other choices", "bert"]))
def test_a_layer_gives_the_numbers_of_one_device(case):
    tensor = CASES[case][2]
    (one, random), (split, _) = _model_and_random(case, TensorAxis()), _model_and_random(case, tensor)
    params, weight, batch = first_layer(random_params(one.config)), stream(seed=3), batch_of(CASES[case][0])
    found = _over_devices(
        tensor, lambda params, x: split.layer(params, x, batch, random), split.specs["layers"], weight, params, stream()
    )
    expected = jax.jit(
        lambda params, x: _value_and_gradients(lambda params, x: one.layer(params, x, batch, random), weight, params, x)
    )(params, stream())
    assert_near(found, expected)


@pytest.mark.parametrize(
    "case", in_tiers(["gpt dropout", "gpt deterministic", "bert dropout", "llama"], default=["gpt dropout"])
)
def test_an_embedding_gives_the_numbers_of_one_device(case):
    tensor, batch = CASES[case][2], batch_of(CASES[case][0])
    (one, random), (split, _) = _model_and_random(case, TensorAxis()), _model_and_random(case, tensor)
    params, weight = {"embedding": random_params(one.config)["shared"]["embedding"]}, stream(seed=3)
    specs = {"embedding": split.specs["shared"]["embedding"]}
    found = _over_devices(tensor, lambda params: split.embed(params, batch, random), specs, weight, params)
    expected = jax.jit(
        lambda params: _value_and_gradients(lambda params: one.embed(params, batch, random), weight, params)
    )(params)
    # Of a token's row all devices but one have zeros, so that not even the last digit changes.
    np.testing.assert_array_equal(found[0], expected[0])
    assert_near(found, expected)
    if random is not None:
        share_dropped = float((found[0] == 0).mean())
        assert 0.1 < share_dropped < 0.3  # the rate is 0.2


@pytest.mark.parametrize(
    "case",
    in_tiers(["gpt", "gpt dropout", "gpt deterministic", "bert", "bert dropout", "llama"], default=["bert dropout"]),
)  # untied and tied
def test_a_head_gives_the_numbers_of_one_device(case):
    tensor, batch = CASES[case][2], batch_of(CASES[case][0])
    one, split = (_model_and_random(case, t)[0] for t in (TensorAxis(), tensor))
    params, weight = random_params(one.config)["shared"], np.float32(0.3)
    found = _over_devices(
        tensor,
        lambda params, x: total(split.head(params, x, batch)),
        split.specs["shared"],
        weight,
        params,
        stream(),
        y_spec=P(),
    )
    expected = jax.jit(
        lambda params, x: _value_and_gradients(lambda params, x: total(one.head(params, x, batch)), weight, params, x)
    )(params, stream())
    assert_near(found, expected)


@pytest.mark.parametrize(
    ("family", "tie_embeddings", "num_devices"),
    in_tiers([("gpt", True, 4), ("gpt", False, 2), ("bert", True, 2), ("bert", False, 4)], default=[("gpt", True, 4)]),
)
def test_rows_that_are_no_words_change_nothing_on_any_number_of_devices(family, tie_embeddings, num_devices):
    """Of 21 words, in 32 rows, four devices hold 8, 8, 5 and 0; what the rows beyond them hold is never used."""
    changes = {"vocab_size": 21, "tie_embeddings": tie_embeddings}
    one = LanguageModel(config_of(family, **changes))
    tensor = TensorAxis(num_devices)
    split = LanguageModel(config_of(family, **changes, vocab_multiple=32), tensor)
    batch = batch_of(family)
    batch = {name: np.pad(batch[name], ((0, 0), (0, 2)), constant_values=1) for name in batch if batch[name].ndim > 1}
    batch |= {"tokens": batch["tokens"] % 21, "targets": np.minimum(batch["targets"], 20)}
    batch |= {"sentence_order": masked_tokens()["sentence_order"]}
    params, x, weight = random_params(one.config)["shared"], normal(BATCH, SEQ + 2, HIDDEN), np.float32(0.3)

    def with_rows(leaf, shape):
        return np.pad(leaf, [(0, wanted - have) for wanted, have in zip(shape.shape, leaf.shape, strict=True)])

    shapes = jax.eval_shape(split.init, jax.random.key(0))["shared"]
    padded = jax.tree.map(with_rows, params, shapes)
    rubbish = jax.tree.map(lambda leaf: np.where(leaf == 0, np.float32(7), leaf), padded)

    def both_ends(model):
        return lambda params, x: total(model.head(params, x + model.embed(params, batch, None), batch))

    found = _over_devices(tensor, both_ends(split), split.specs["shared"], weight, rubbish, x, y_spec=P())
    value, gradients = jax.jit(lambda *given: _value_and_gradients(both_ends(one), weight, *given))(params, x)
    assert_near(found, (value, (jax.tree.map(with_rows, gradients[0], shapes), gradients[1])))


def test_four_devices_have_their_pieces_and_words_in_order():
    """One more size: with two, an order reversed twice could hide."""
    tensor = TensorAxis(4)
    config = config_of("gpt", num_positions=SEQ + 2)
    batch = {name: np.pad(array, ((0, 0), (0, 2)), constant_values=1) for name, array in tokens_and_targets().items()}
    x, params = normal(BATCH, SEQ + 2, HIDDEN), random_params(config)["shared"]
    one, split = LanguageModel(config), LanguageModel(config, tensor)
    specs = split.specs["shared"]

    def embed_and_head(model):
        return lambda params, x: (model.embed(params, batch, None), model.head(params, x, batch))

    found = jax.jit(
        jax.shard_map(
            embed_and_head(split),
            mesh=make_mesh(tensor=4),
            in_specs=(specs, PIECES),
            out_specs=(PIECES, P()),
            check_vma=False,
        )
    )(params, x)
    assert VOCAB_SIZE % 4 == 0
    assert_near(found, jax.jit(embed_and_head(one))(params, x))


@cache
def _dropped(tensor: TensorAxis, first_sequence: int) -> np.ndarray:
    """Where the last draw of a GPT layer drops: what it adds to a stream of zeros is 0 nowhere else."""
    config = config_of("gpt", hidden_dropout=0.4)
    model = LanguageModel(config, tensor)
    params = jax.tree.map(jnp.zeros_like, first_layer(random_params(config)))
    params["feed_forward"]["down"]["bias"] = jnp.ones(HIDDEN)
    apply = jax.jit(
        jax.shard_map(
            lambda params, x: model.layer(params, x, {}, randomness(first_sequence)),
            mesh=make_mesh(tensor=tensor.size),
            in_specs=(model.specs["layers"], PIECES),
            out_specs=PIECES,
            check_vma=False,
        )
    )
    return np.asarray(apply(params, jnp.zeros((BATCH, SEQ, HIDDEN)))) == 0


def test_masks_are_the_same_bits_on_any_number_of_devices():
    whole = _dropped(TensorAxis(), 5)
    assert 0.35 < whole.mean() < 0.45
    np.testing.assert_array_equal(_dropped(TensorAxis(2), 5), whole)
    assert (_dropped(TensorAxis(2), 6) != whole).mean() > 0.3
