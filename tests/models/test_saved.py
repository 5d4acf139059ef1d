"""What a layer saves for its backward: each array that it needs once, in compute dtype, split over `tensor`."""

import itertools
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P
from small_models import (
    BATCH,
    DROPOUT,
    HIDDEN,
    NUM_HEADS,
    NUM_KV_HEADS,
    SEQ,
    config_of,
    in_tiers,
    masked_tokens,
    randomness,
    tokens_and_targets,
)

from jaxpipe.mesh import TensorAxis, make_mesh
from jaxpipe.models import LanguageModel, linear

HEAD_SIZE = HIDDEN // NUM_HEADS
NUM_KEY_VALUE = {"gpt": NUM_HEADS, "bert": NUM_HEADS, "llama": NUM_KV_HEADS}
# What enters the activation: one array of 4 hidden; two of `feed_forward`.
WIDTHS = {"gpt": [4 * HIDDEN], "bert": [4 * HIDDEN], "llama": [40, 40]}

FORMS = [
    *itertools.product(["gpt", "llama"], ["none", "full"], ["xla", "chunked"]),
    *itertools.product(["gpt", "llama"], ["attention"], ["xla"]),
]
CASES = [
    *[(*form, has_dropout) for form in FORMS for has_dropout in ([False, True] if form[0] == "gpt" else [False])],
    *[("bert", *form, True) for form in [("none", "xla"), ("none", "chunked"), ("attention", "xla"), ("full", "xla")]],
]
# A stride of 11 over 76 cases meets each family, form, dtype and number of devices.
ALL_CASES = [(*case, dtype, num) for case in CASES for dtype in ("float32", "bfloat16") for num in (1, 2)]


def _config(family: str, recompute: str, attention: str, has_dropout: bool):
    dropout = DROPOUT if has_dropout else {}
    return config_of(family, recompute=recompute, attention=attention, **dropout)


def _expected(family: str, recompute: str, attention: str, dtype: str, num_devices: int) -> list[tuple]:
    """(shape, dtype) of each array; heads and columns are split over devices, and so is the stream."""
    if recompute == "full":
        return []
    num_heads, num_kv_heads = NUM_HEADS // num_devices, NUM_KEY_VALUE[family] // num_devices
    queries, keys = (BATCH, SEQ, num_heads, HEAD_SIZE), (BATCH, SEQ, num_kv_heads, HEAD_SIZE)
    between_the_halves = (BATCH, SEQ // num_devices, HIDDEN)
    saved = [
        *[(shape, dtype) for shape in (queries, keys, keys)],
        (queries, dtype),  # the attended values
        (between_the_halves, dtype),
        *[((BATCH, SEQ, width // num_devices), dtype) for width in WIDTHS[family]],
    ]
    group = NUM_HEADS // NUM_KEY_VALUE[family]
    if attention == "chunked":  # the log-sum-exps
        saved.append(((BATCH, num_kv_heads, group, SEQ), "float32"))
    elif recompute == "none":  # the probabilities
        saved.append(((BATCH, num_kv_heads, group * SEQ, SEQ), dtype))
    return sorted(saved)


def _saved(config, dtype: str, num_devices: int, random, *, padding=False) -> tuple[list[tuple], list[tuple]]:
    """(shape, dtype) of what the layer saves on a device; and shapes of its own arguments that backward uses again."""
    batch = masked_tokens() if padding else tokens_and_targets()
    model = LanguageModel(config, TensorAxis(num_devices))

    def shape(leaf, spec):
        dims = [n // num_devices if axis else n for n, axis in itertools.zip_longest(leaf.shape[1:], spec)]
        return jax.ShapeDtypeStruct(tuple(dims), dtype)

    whole = jax.eval_shape(model.init, jax.random.key(0))["layers"]
    params = jax.tree.map(shape, whole, model.specs["layers"])
    x = jax.ShapeDtypeStruct((BATCH, SEQ // num_devices, HIDDEN), dtype)

    def trace(params, x, microbatch, random):
        vjp: Any = jax.vjp(model.layer, params, x, microbatch, random)[1]
        return [
            [leaf for leaf in jax.tree.leaves(kept) if hasattr(leaf, "shape")]
            for kept in (vjp.opaque_residuals, vjp.args_res[1:])
        ]

    on_device = jax.shard_map(trace, mesh=make_mesh(tensor=num_devices), in_specs=P(), out_specs=P(), check_vma=False)
    saved, arguments = jax.eval_shape(on_device, params, x, batch, random)
    return sorted((leaf.shape, str(leaf.dtype)) for leaf in saved), [leaf.shape for leaf in arguments]


@pytest.mark.parametrize(
    ("family", "recompute", "attention", "has_dropout", "dtype", "num_devices"),
    in_tiers(ALL_CASES, default=ALL_CASES[::11]),
)
def test_a_layer_saves_this_and_nothing_else(family, recompute, attention, has_dropout, dtype, num_devices):
    config = _config(family, recompute, attention, has_dropout)
    is_padded = family == "bert"
    random = randomness() if has_dropout else None
    saved, arguments = _saved(config, dtype, num_devices, random, padding=is_padded)
    assert saved == _expected(family, recompute, attention, dtype, num_devices)
    # The stream that enters; the padding mask as the microbatch has it, where scores are computed again; and, for
    # masks that are drawn again, the key and the first sequence as they were given.
    computes_scores_again = attention == "chunked" or recompute != "none"
    assert arguments == [
        (BATCH, SEQ // num_devices, HIDDEN),
        *([(BATCH, SEQ)] if is_padded and computes_scores_again else []),
        *([(2,), ()] if has_dropout else []),
    ]


def test_dropout_saves_nothing_more():
    """That masks were drawn at all, `test_language_model` shows."""
    with_dropout, without = (
        _saved(_config("gpt", "none", "xla", has_dropout), "float32", 1, randomness()) for has_dropout in (True, False)
    )
    assert with_dropout[0] == without[0]


@pytest.mark.parametrize("attention", ["xla", "chunked"])
def test_padding_saves_nothing_more(attention):
    """That padding is masked at all, `test_bert` shows."""
    config = _config("bert", "none", attention, False)
    padded, unpadded = (_saved(config, "float32", 1, None, padding=padding) for padding in (True, False))
    assert padded[0] == unpadded[0]


@pytest.mark.parametrize("name", ["_from_stream", "_to_stream"])
def test_an_array_too_many_would_be_seen(monkeypatch, name):
    """Without its checkpoint the one keeps the normed stream, the other the activation's result."""
    monkeypatch.setattr(linear, name, getattr(linear, name).__wrapped__)
    saved, _ = _saved(_config("gpt", "none", "xla", False), "float32", 1, None)
    assert len(saved) > len(_expected("gpt", "none", "xla", "float32", 1))
