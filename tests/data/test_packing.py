"""Rows of documents: every token is predicted once, from its own document alone, and little is padded."""

import numpy as np
import pytest

from jaxpipe.data import Batches, Documents, PackedSequences
from jaxpipe.data.packing import best_fit, cut_documents

LENGTHS = [[6, 4], [1, 1, 2, 1], [1, 30, 2, 9, 17, 8, 3, 3, 3, 25], [9] * 7, [8, 0, 2, 5, 7, 40]]


def documents_of(lengths, **more) -> Documents:
    ends = np.cumsum(lengths)
    return Documents.ending_at(np.arange(100, 100 + ends[-1]), lambda: ends, **more)


def all_rows(rows: PackedSequences) -> dict[str, np.ndarray]:
    return rows.take(np.arange(rows.num_sequences), epoch=0)


@pytest.mark.parametrize("one_each", [False, True])
@pytest.mark.parametrize("seq_len", [1, 3, 8, 64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_every_token_but_the_first_of_a_document_is_a_target_once(lengths, seq_len, one_each):
    documents = documents_of(lengths)
    batch = all_rows(PackedSequences(documents, seq_len, one_each))
    targets = batch["targets"][batch["targets"] >= 0]
    starts = 100 + np.cumsum(lengths) - lengths
    assert sorted(targets.tolist()) == sorted(set((documents.tokens).tolist()) - set(starts.tolist()))
    # The tokens count up, so a token is the one before its target, in the same document.
    np.testing.assert_array_equal(batch["tokens"][batch["targets"] >= 0] + 1, targets)
    # Padding is no token, and stands at the end of a row.
    is_padding = batch["targets"] < 0
    assert not batch["tokens"][is_padding].any()
    assert (np.diff(is_padding.astype(int), axis=1) >= 0).all()


@pytest.mark.parametrize("seq_len", [1, 3, 8, 64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_positions_begin_anew_with_each_document_and_with_the_padding(lengths, seq_len):
    batch = all_rows(PackedSequences(documents_of(lengths), seq_len))
    first = batch["tokens"] - batch["positions"]  # the first token of the piece, as tokens count up
    for row in range(len(first)):
        begins = batch["positions"][row] == 0
        assert begins[0]
        assert (np.diff(batch["positions"][row])[~begins[1:]] == 1).all()
        is_token = batch["targets"][row] >= 0
        assert len(np.unique(first[row][is_token])) == (begins & is_token).sum()


def test_one_document_a_row_needs_no_positions():
    batch = all_rows(PackedSequences(documents_of([3, 5]), 4, one_each=True))
    assert batch["tokens"].tolist() == [[100, 101, 0, 0], [103, 104, 105, 106]]
    assert batch["targets"].tolist() == [[101, 102, -1, -1], [104, 105, 106, 107]]
    assert "positions" not in batch


def test_what_is_only_read_is_no_target():
    learned = np.array([0, 0, 1, 0, 1, 1], np.uint8)
    batch = all_rows(PackedSequences(documents_of([3, 3], learned=learned), 4))
    assert batch["tokens"].tolist() == [[100, 101, 103, 104]]
    assert batch["targets"].tolist() == [[-1, 102, 104, 105]]


def test_the_longest_go_first_and_each_where_the_least_room_is_left():
    """By hand: 7 and 6 begin rows; 3 fits into neither; the 2s: one into the row with 6, one into that with 3."""
    assert best_fit(np.array([2, 3, 7, 6, 2, 3]), 8).tolist() == [1, 2, 0, 1, 2, 2]


@pytest.mark.parametrize("capacity", [7, 16, 100])
def test_best_fit_is_that_of_one_piece_after_the_other(capacity):
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 400)
    room, expected = [], np.empty(len(lengths), int)
    for piece in np.argsort(-lengths, kind="stable"):
        fitting = [(left, row) for row, left in enumerate(room) if left >= lengths[piece]]
        row = min(fitting)[1] if fitting else len(room)
        room += [] if fitting else [capacity]
        room[row] -= lengths[piece]
        expected[piece] = row
    found = best_fit(lengths, capacity)
    assert np.bincount(found, lengths).max() <= capacity
    assert sorted(np.bincount(found, lengths)) == sorted(np.bincount(expected, lengths))


def test_pieces_of_a_document_share_the_token_between_them():
    starts, lengths = cut_documents(np.array([0, 10, 10, 11]), np.array([10, 10, 11, 14]), 4)
    assert starts.tolist() == [0, 4, 8, 11]
    assert lengths.tolist() == [4, 4, 1, 2]


def test_little_is_padded_where_lengths_are_mixed():
    lengths = np.exp(np.random.default_rng(0).uniform(np.log(16), np.log(4096), 3000)).astype(int)
    assert PackedSequences(documents_of(lengths), 4096).padding < 0.005
    assert PackedSequences(documents_of(lengths), 4096, one_each=True).padding > 0.7


def test_rows_come_in_batches_and_the_last_is_filled():
    rows = PackedSequences(documents_of([9] * 7), 16)
    batches = Batches((rows,), batch_size=2, num_microbatches=2, seed=0)
    assert rows.num_sequences == 4
    assert batches.at(3)["positions"].shape == (2, 1, 16)
    *_, last = Batches((rows,), batch_size=3, num_microbatches=1, seed=0).first(9)
    for name in ("tokens", "positions"):  # the row before it once more
        np.testing.assert_array_equal(last[name][0, 1:], last[name][0, [0, 0]])
    assert (last["targets"][0, 1:] == -1).all()
