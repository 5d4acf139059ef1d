"""What a query sees, in each form of attention: windows, padding and both directions against plain formulas."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from plain_attention import (
    kept,
    new_arrays,
    new_dropout,
    new_padding_mask,
    new_positions,
    plain_attention,
    value_and_grads,
)
from small_models import in_tiers

from jaxpipe.models import attention_chunked
from jaxpipe.models.attention import Visible, chunked, xla
from jaxpipe.models.attention_chunked import blocks

FORMS = pytest.mark.parametrize("form", [xla, chunked])
VISIBLE = {
    "all": lambda seq: Visible(causal=False),
    "padding": lambda seq: Visible(causal=False, padding_mask=new_padding_mask(seq, at_end=False)),
    "window of one": lambda seq: Visible(window=1),
    "window": lambda seq: Visible(window=seq // 3),
    "window longer than the sequence": lambda seq: Visible(window=seq + 1),
    "window longer than any": lambda seq: Visible(window=2**40),
    "all three": lambda seq: Visible(window=seq // 2, padding_mask=new_padding_mask(seq, at_end=True)),
    "documents": lambda seq: Visible(positions=new_positions(seq, seq // 5, seq // 2, 2 * seq // 3)),
    "documents in both directions": lambda seq: Visible(causal=False, positions=new_positions(seq, 2)),
    "all four": lambda seq: Visible(
        window=seq // 2,
        padding_mask=new_padding_mask(seq, at_end=True),
        positions=new_positions(seq, seq // 3, seq // 2),
    ),
}


# Of 300 positions the blocks are three, and what they see differs; of dropout a block's first key decides.
@pytest.mark.parametrize(
    ("form", "seq", "name"),
    in_tiers(
        ((form, seq, name) for form, seq in ((xla, 7), (chunked, 300)) for name in VISIBLE),
        default=[(xla, 7, "padding"), (xla, 7, "window"), (xla, 7, "documents"), (chunked, 300, "all four")],
    ),
)
def test_a_query_sees_these_keys_and_no_others(form, name, seq):
    visible, arrays = VISIBLE[name](seq), new_arrays(seq=seq, num_kv_heads=2)
    dropout, keep = (new_dropout(), kept(2, 4, seq)) if name in ("all", "window") else (None, None)
    ours = value_and_grads(partial(form, visible=visible, dropout=dropout), *arrays)
    reference = value_and_grads(partial(plain_attention, keep=keep, visible=visible), *arrays)
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@FORMS
def test_where_no_key_is_seen_there_is_no_nan(form):
    arrays = new_arrays(seq=9, num_kv_heads=2)
    nothing = Visible(causal=False, padding_mask=jnp.zeros((2, 9), jnp.int32))
    for array in value_and_grads(partial(form, visible=nothing, dropout=None), *arrays):
        assert np.isfinite(array).all()


@FORMS
def test_a_padded_key_has_no_influence_at_all(form):
    """Its probability is 0, not only small: what it holds may be huge."""
    query, key, value, weight = new_arrays(seq=9, num_kv_heads=2)
    visible = Visible(causal=False, padding_mask=new_padding_mask(9, at_end=True))
    unseen = (visible.padding_mask == 0)[..., None, None]
    plain, changed = (
        value_and_grads(partial(form, visible=visible, dropout=None), query, k, v, weight)
        for k, v in ((key, value), (jnp.where(unseen, 1e3, key), jnp.where(unseen, -1e30, value)))
    )
    for a, b in zip(plain, changed, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.where(unseen, plain[3], 0).any()  # the gradient of their values


@pytest.mark.parametrize(("window", "expected"), [(1, [0, 128, 256]), (130, [0, 0, 0]), (129, [0, 0, 128])])
def test_a_block_of_a_window_leaves_out_the_keys_before_it(window, expected):
    """Block 1 begins at 128, block 2 at 256: of a window of 129 its first query still sees the key at 128."""
    assert [block.first_key for block in blocks(300, Visible(window=window))] == expected


@pytest.mark.parametrize("length", in_tiers((1, 2, 3, 5, 8, 13, 16), default=[3]))
def test_blocks_of_keys_without_a_document_of_the_queries_change_nothing(length, monkeypatch):
    """Sixteen positions in blocks of two, documents of each length: every place where keys may begin is taken."""
    monkeypatch.setattr(attention_chunked, "BLOCK_MULTIPLE", 1)
    visible, arrays = Visible(positions=new_positions(16, *range(0, 16, length))), new_arrays(seq=16, num_kv_heads=2)
    ours = value_and_grads(partial(chunked, visible=visible, dropout=None), *arrays)
    for a, b in zip(ours, value_and_grads(partial(plain_attention, visible=visible), *arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_block_that_is_not_causal_has_all_keys():
    assert {(block.first_key, block.end_key) for block in blocks(300, Visible(causal=False))} == {(0, 300)}
