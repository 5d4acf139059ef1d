"""Attention by tiles: values, gradients, what is passed over and what is held, against plain formulas."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_attention import CAUSAL, kept, new_arrays, new_dropout, plain_attention, value_and_grads
from small_models import in_tiers
from test_visible import VISIBLE

from jaxpipe.mesh import ContextAxis
from jaxpipe.models import attention_chunked, attention_tiles
from jaxpipe.models.attention import Visible, chunked


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(attention_chunked, "MOST_IN_ROW", 0)
    monkeypatch.setattr(attention_tiles, "MOST_IN_TILE", 8)


def _assert_as_plain(visible, *, seq, has_dropout=False):
    arrays = new_arrays(seq=seq, num_kv_heads=2)
    ours = value_and_grads(partial(chunked, visible=visible, dropout=new_dropout() if has_dropout else None), *arrays)
    keep = kept(2, 4, seq) if has_dropout else None
    reference = value_and_grads(partial(plain_attention, keep=keep, visible=visible), *arrays)
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# The last of four tiles overlaps the one before by three tokens in 29, by none in 32, and 5 are one tile.
@pytest.mark.parametrize(
    ("seq", "name", "has_dropout"),
    in_tiers(
        ((seq, name, drops) for seq in (5, 29, 32) for name in VISIBLE for drops in (False, True)),
        default=[(29, "all four", True), (29, "padding", False), (32, "documents", False), (5, "window", False)],
    ),
)
def test_values_and_gradients_are_those_of_the_plain_formula(seq, name, has_dropout):
    _assert_as_plain(VISIBLE[name](seq), seq=seq, has_dropout=has_dropout)


@pytest.mark.parametrize(
    ("visible", "num_pairs"),
    [(CAUSAL, 10), (Visible(window=1), 4), (Visible(window=9), 7), (Visible(causal=False), 16)],
)
def test_pairs_that_no_query_sees_are_not_in_the_loop(visible, num_pairs):
    found = attention_tiles.pairs(32, visible)
    assert found.size == 8
    assert found.own.query.shape == (1, num_pairs)
    assert not found.others.query.size


def test_tiles_of_other_documents_are_passed_over():
    """Numbers that would make NaN stand in keys that the documents of no tile's queries have."""
    visible = Visible(positions=jnp.tile(jnp.arange(32) % 16, (2, 1)))
    query, key, value, weight = new_arrays(seq=32, num_kv_heads=2)
    output, *_ = value_and_grads(partial(chunked, visible=visible, dropout=None), query, key, value, weight)
    value[:, :16] = np.nan
    changed, *_ = value_and_grads(partial(chunked, visible=visible, dropout=None), query, key, value, weight)
    np.testing.assert_array_equal(changed[:, 16:], output[:, 16:])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("causal", [True, False])
def test_devices_of_a_context_have_all_pairs_once_and_equally_many(causal, window):
    if window and not causal:
        pytest.skip("a window is causal")
    visible = Visible(causal=causal, window=window, context=ContextAxis(4, causal=causal))
    size, own, others = attention_tiles.pairs(64, visible)
    of_devices = [
        {
            (int(query), int(key))
            for pairs in (own, others)
            for query, key, skip in zip(pairs.query[i], pairs.key[i], pairs.key_skip[i], strict=True)
            if skip < size
        }
        for i in range(4)
    ]
    expected = {
        (query, key)
        for query in range(0, 64, size)
        for key in range(0, 64, size)
        if (not causal or query >= key) and (window is None or query - key < window + size - 1)
    }
    assert sum(map(len, of_devices)) == len(expected)
    assert set.union(*of_devices) == expected
    if not window:
        assert len({len(all_pairs) for all_pairs in of_devices}) == 1
    for device, (query, key, place) in enumerate(zip(own.query, own.key, own.key_place, strict=True)):
        chunks = visible.context.chunks(device)
        length = 64 // visible.context.num_chunks
        assert {*query // length, *key // length} <= {*chunks}
        assert [*place] == [length * chunks.index(number // length) + number % length for number in key]
    if causal and not window:  # each chunk with itself, and the later one with the earlier
        assert own.key.shape[1] * size**2 == 3 * 8**2


@pytest.mark.ci
def test_a_long_row_has_the_scores_of_one_pair(monkeypatch):
    monkeypatch.setattr(attention_tiles, "MOST_IN_TILE", 128)
    arrays = new_arrays(seq=2048, num_kv_heads=1, num_heads=2, batch=1)
    gradient = jax.jit(jax.grad(lambda *a: chunked(*a, visible=CAUSAL, dropout=None).sum(), (0, 1, 2)))
    text = gradient.lower(*arrays[:3]).compile().as_text()
    shapes = [tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
    scores = 2 * 128 * 128
    assert max(map(np.prod, shapes)) == max(scores, 2048 * 2 * 8)  # queries are as large


@pytest.mark.parametrize("mistake", ["key", "query", "query_skip"])
def test_a_mistake_in_a_pair_is_seen(mistake, monkeypatch):
    right = attention_tiles.pairs

    def wrong(seq, visible):
        found = right(seq, visible)
        number = getattr(found.own, mistake).copy()
        number[0, 2] += 1  # of the second tile against itself
        return found._replace(own=found.own._replace(**{mistake: number}))

    monkeypatch.setattr(attention_tiles, "pairs", wrong)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        _assert_as_plain(CAUSAL, seq=29)
