"""A row of tokens in two parts, against the same cut by hand."""

import numpy as np
import pytest

from jaxpipe.data import blocks
from jaxpipe.data.blocks import Blocks, split


def by_hand(tokens: list[int], num_block: int, every: int) -> tuple[list[int], list[int]]:
    parts = ([], [])
    for number, begin in enumerate(range(0, len(tokens), num_block)):
        parts[number % every == every - 1].extend(tokens[begin : begin + num_block])
    return parts


@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("num_block", [1, 4])
def test_parts_are_what_is_cut_by_hand_for_every_length(num_block, every):
    for num_tokens in range(3 * num_block * every):
        tokens = np.arange(100, 100 + num_tokens)
        for is_heldout, expected in enumerate(by_hand(tokens.tolist(), num_block, every)):
            part = Blocks(tokens, num_block, every, bool(is_heldout))
            assert len(part) == len(expected)
            assert part[np.arange(len(part))].tolist() == expected


def test_places_may_be_of_any_shape_and_in_any_order():
    part = Blocks(np.arange(60), 4, 3, is_heldout=False)
    whole = part[np.arange(len(part))]
    places = np.array([[39, 0, 8], [7, 7, 21]])
    np.testing.assert_array_equal(part[places], whole[places])


def test_blocks_are_large_and_of_a_short_text_such_that_there_is_one_to_hold_out(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 10)
    train, heldout = split(np.arange(200), every=4)
    assert heldout[np.arange(20)].tolist() == [*range(30, 40), *range(70, 80)]
    train, heldout = split(np.arange(12), every=4)
    assert heldout[np.arange(len(heldout))].tolist() == [9, 10, 11]
    assert len(train) == 9
