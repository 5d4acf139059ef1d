"""Masked sequences: what stands where, and that nothing but (seed, epoch, index) decides it."""

from dataclasses import replace

import numpy as np
import pytest
from small_masked import (
    ALL,
    CLASSIFICATION,
    MASK,
    NUM_SEQUENCES,
    NUM_SPECIAL,
    PADDING,
    SEPARATOR,
    SEQ_LEN,
    SEQUENCES,
    VOCABULARY,
    WINDOW,
    read,
)

from jaxpipe.data import Batches, MaskedSequences

BATCH = SEQUENCES.take(ALL, epoch=0)


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_arrays_have_the_shapes_that_models_expect():
    shapes = {name: values.shape for name, values in BATCH.items()}
    width = 6  # round(0.15 * 37 = 5.55)
    assert shapes == {
        "tokens": (NUM_SEQUENCES, SEQ_LEN),
        "token_types": (NUM_SEQUENCES, SEQ_LEN),
        "padding_mask": (NUM_SEQUENCES, SEQ_LEN),
        "predicted": (NUM_SEQUENCES, width),
        "targets": (NUM_SEQUENCES, width),
        "sentence_order": (NUM_SEQUENCES,),
    }
    assert {values.dtype for values in BATCH.values()} == {np.dtype(np.int32)}


def test_with_its_targets_put_back_and_in_order_a_sequence_is_a_stretch_of_its_window():
    for row in range(NUM_SEQUENCES):
        example = read(BATCH, row)
        assert example.first
        assert example.second
        text = example.second + example.first if BATCH["sentence_order"][row] else example.first + example.second
        begin, end = NUM_SPECIAL + row * WINDOW, NUM_SPECIAL + (row + 1) * WINDOW
        assert begin <= text[0]
        assert text[-1] < end
        assert text == list(range(text[0], text[0] + len(text)))


def test_special_tokens_types_and_padding_stand_around_the_segments():
    for row in range(NUM_SEQUENCES):
        example = read(BATCH, row)
        num_first, num_second = len(example.first), len(example.second)
        num_padding = WINDOW - num_first - num_second
        padding = [PADDING] * num_padding
        assert example.tokens == [
            *(CLASSIFICATION, *example.first, SEPARATOR),
            *(*example.second, SEPARATOR, *padding),
        ]
        types = [0] * (num_first + 2) + [1] * (num_second + 1) + [0] * num_padding
        assert BATCH["token_types"][row].tolist() == types
        assert BATCH["padding_mask"][row].tolist() == [1] * (SEQ_LEN - num_padding) + [0] * num_padding


def test_so_many_different_words_are_predicted_and_nothing_else_is_changed():
    for row in range(NUM_SEQUENCES):
        example = read(BATCH, row)
        num_words = len(example.first) + len(example.second)
        is_valid = BATCH["targets"][row] >= 0
        places = BATCH["predicted"][row][is_valid]
        assert len(set(places.tolist())) == len(places) == max(1, round(0.15 * num_words))
        assert (BATCH["targets"][row][is_valid] >= NUM_SPECIAL).all()
        assert is_valid.tolist() == sorted(is_valid.tolist(), reverse=True)
        assert (BATCH["predicted"][row][~is_valid] == 0).all()
        assert (BATCH["targets"][row][~is_valid] == -1).all()
        changed = np.flatnonzero(BATCH["tokens"][row] != example.tokens)
        assert set(changed.tolist()) <= set(places.tolist())


def test_special_tokens_within_the_text_are_never_predicted_or_drawn():
    is_end = np.arange(len(SEQUENCES.tokens)) % 3 == 0  # documents of two words
    tokens = np.where(is_end, SEPARATOR, SEQUENCES.tokens)
    batch = replace(SEQUENCES, tokens=tokens, mask_fraction=1.0, short_fraction=0.0).take(ALL, epoch=0)
    is_valid = batch["targets"] >= 0
    assert (batch["targets"][is_valid] >= NUM_SPECIAL).all()
    np.testing.assert_array_equal(is_valid.sum(axis=1), (~is_end).reshape(NUM_SEQUENCES, WINDOW).sum(axis=1))
    np.testing.assert_array_equal(  # and the two of the sequence
        (batch["tokens"] == SEPARATOR).sum(axis=1), is_end.reshape(NUM_SEQUENCES, WINDOW).sum(axis=1) + 2
    )


def test_a_text_without_words_predicts_nothing():
    tokens = np.full(3 * WINDOW, SEPARATOR)
    batch = replace(SEQUENCES, tokens=tokens).take(np.arange(3), epoch=0)
    assert (batch["targets"] == -1).all()
    assert (batch["predicted"] == 0).all()
    assert (batch["tokens"] != MASK).all()


@pytest.mark.parametrize("seq_len", [5, 6, 7])
def test_the_shortest_sequences_have_a_token_a_segment(seq_len):
    sequences = replace(SEQUENCES, seq_len=seq_len, short_fraction=0.5)
    batch = sequences.take(np.arange(200), epoch=0)
    assert batch["predicted"].shape == (200, 1)
    assert (batch["targets"] >= NUM_SPECIAL).all()
    for row in range(200):
        assert min(len(read(batch, row).first), len(read(batch, row).second)) >= 1


def test_a_row_does_not_depend_on_what_is_taken_with_it():
    some = np.array([7, 1999, 0, 7])
    assert_same(SEQUENCES.take(some, epoch=0), {name: values[some] for name, values in BATCH.items()})


def test_an_epoch_and_a_seed_are_always_the_same_and_others_differ():
    assert_same(replace(SEQUENCES).take(ALL, epoch=0), BATCH)
    for other in (SEQUENCES.take(ALL, epoch=1), replace(SEQUENCES, seed=1).take(ALL, epoch=0)):
        # 6 of 37 words are predicted again with a probability of 1 / C(37, 6) = 4e-7, alike cut besides.
        assert (other["predicted"] == BATCH["predicted"]).all(axis=1).mean() < 0.01
        is_swapped_alike = (other["sentence_order"] == BATCH["sentence_order"]).mean()
        assert abs(is_swapped_alike - 0.5) < 5 * np.sqrt(0.25 / NUM_SEQUENCES)


def test_without_sentence_order_the_packing_is_the_same_and_nothing_is_swapped():
    batch = replace(SEQUENCES, sentence_order=False).take(ALL, epoch=0)
    assert set(BATCH) - set(batch) == {"sentence_order"}
    for name in ("token_types", "padding_mask"):
        np.testing.assert_array_equal(batch[name], BATCH[name])
    for row in range(0, NUM_SEQUENCES, 10):
        example = read(batch, row)
        text = example.first + example.second
        assert text == list(range(text[0], text[0] + len(text)))


def test_batches_and_microbatches_only_group():
    few = Batches((SEQUENCES,), batch_size=20, num_microbatches=5, seed=0)
    many = Batches((SEQUENCES,), batch_size=100, num_microbatches=1, seed=0)
    steps = [few.at(step) for step in range(5)]
    assert steps[0]["tokens"].shape == (5, 4, SEQ_LEN)
    assert steps[0]["sentence_order"].shape == (5, 4)
    joined = {name: np.concatenate([batch[name].reshape(20, -1) for batch in steps]) for name in steps[0]}
    assert_same(joined, {name: values.reshape(100, -1) for name, values in many.at(0).items()})


def test_another_epoch_masks_the_same_sequences_anew():
    batches = Batches((SEQUENCES,), batch_size=NUM_SEQUENCES, num_microbatches=1, seed=0)
    first, second = ({name: values[0] for name, values in batches.at(step).items()} for step in (0, 1))

    def window_of(batch, row):
        return (min(read(batch, row).first) - NUM_SPECIAL) // WINDOW

    second_row = {window_of(second, row): row for row in range(NUM_SEQUENCES)}
    assert len(second_row) == NUM_SEQUENCES
    again = [second["predicted"][second_row[window_of(first, row)]] for row in range(NUM_SEQUENCES)]
    assert (again == first["predicted"]).all(axis=1).mean() < 0.01


def test_evaluation_sees_every_sequence_once_and_what_is_missing_counts_for_nothing():
    sequences = MaskedSequences(SEQUENCES.tokens[: 10 * WINDOW], SEQ_LEN, VOCABULARY, 0.15, 0.1, 0, sentence_order=True)
    batches = Batches((sequences,), batch_size=4, num_microbatches=2, seed=0)
    *full, last = batches.first(100)
    assert len(full) == 2
    for again, batch in zip(batches.first(100), [*full, last], strict=True):
        assert_same(again, batch)
    rows = {name: values.reshape(4, -1) for name, values in last.items()}
    assert (rows["targets"][:2] >= 0).any(axis=1).all()
    for name, values in rows.items():  # those before it once more
        np.testing.assert_array_equal(values[2:], -1 if name in ("targets", "sentence_order") else values[:2])
    assert {values.dtype for values in last.values()} == {np.dtype(np.int32)}
