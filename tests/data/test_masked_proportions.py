"""How often masked sequences do what BERT's do, within 5 standard deviations of the binomial distribution.

A right program leaves them once in 1.7 million looks; the seeds are fixed, so it does not.
"""

from dataclasses import replace

import numpy as np
import pytest
from small_masked import ALL, MASK, NUM_SEQUENCES, NUM_SPECIAL, NUM_WORDS, SEQUENCES, WHOLE, WINDOW

WHOLE_BATCH = WHOLE.take(ALL, epoch=0)


def assert_binomial(count, num_trials: int, probability: float):
    """`count`, a number or an array of them, is one of `num_trials` of this probability."""
    deviation = np.abs(count - num_trials * probability).max()
    assert deviation <= 5 * np.sqrt(num_trials * probability * (1 - probability)) + 1e-9


def num_tokens(batch) -> np.ndarray:
    return batch["padding_mask"].sum(axis=1) - 3


def num_first(batch) -> np.ndarray:
    return batch["padding_mask"].sum(axis=1) - batch["token_types"].sum(axis=1) - 2


@pytest.mark.parametrize("seed", [0, 1])
def test_of_the_predicted_words_80_percent_are_masked_10_random_10_kept(seed):
    batch = replace(WHOLE, seed=seed).take(ALL, epoch=0)
    seen, words = np.take_along_axis(batch["tokens"], batch["predicted"], axis=1), batch["targets"]
    total = words.size
    assert total == 6 * NUM_SEQUENCES  # 15 % of 37 are 5.55
    is_mask, is_kept = seen == MASK, seen == words
    assert_binomial(is_mask.sum(), total, 0.8)
    assert_binomial(is_kept.sum(), total, 0.1 + 0.1 / NUM_WORDS)  # a random word may be the same
    others = seen[~is_mask & ~is_kept]
    assert_binomial(len(others), total, 0.1 - 0.1 / NUM_WORDS)
    assert others.min() >= NUM_SPECIAL
    assert_binomial((others < NUM_SPECIAL + NUM_WORDS // 4).sum(), len(others), 0.25)  # of all words, each as probable


@pytest.mark.parametrize("fraction", [0.05, 0.15, 0.5])
def test_every_place_of_the_text_is_predicted_as_often(fraction):
    batch = replace(WHOLE, mask_fraction=fraction).take(ALL, epoch=0)
    is_second = np.take_along_axis(batch["token_types"], batch["predicted"], axis=1)
    counts = np.bincount((batch["predicted"] - 1 - is_second).ravel(), minlength=WINDOW)
    assert len(counts) == WINDOW
    assert_binomial(counts, NUM_SEQUENCES, max(1, round(fraction * WINDOW)) / WINDOW)


def test_half_of_the_pairs_are_swapped():
    assert set(WHOLE_BATCH["sentence_order"].tolist()) == {0, 1}
    assert_binomial(WHOLE_BATCH["sentence_order"].sum(), NUM_SEQUENCES, 0.5)


@pytest.mark.parametrize("order", [0, 1])
def test_the_cut_is_anywhere_as_often(order):
    counts = np.bincount(num_first(WHOLE_BATCH)[WHOLE_BATCH["sentence_order"] == order], minlength=WINDOW)
    assert counts[0] == 0
    assert_binomial(counts[1:], counts.sum(), 1 / (WINDOW - 1))


def test_the_cut_tells_neither_the_order_nor_the_words_to_predict():
    is_second = np.take_along_axis(WHOLE_BATCH["token_types"], WHOLE_BATCH["predicted"], axis=1)
    words = (WHOLE_BATCH["predicted"] - 1 - is_second).mean(axis=1)
    for other in (WHOLE_BATCH["sentence_order"], words):
        correlation = np.corrcoef(num_first(WHOLE_BATCH), other)[0, 1]
        assert abs(correlation) < 5 / np.sqrt(NUM_SEQUENCES - 1)  # its standard deviation where there is none


@pytest.mark.parametrize("fraction", [0.1, 1.0])
def test_short_sequences_are_as_many_as_said_and_every_length_as_probable(fraction):
    counts = np.bincount(num_tokens(replace(SEQUENCES, short_fraction=fraction).take(ALL, epoch=0)))
    assert len(counts) == WINDOW + 1
    assert counts[:2].sum() == 0
    each = fraction / (WINDOW - 1)  # of 2 .. WINDOW
    assert_binomial(counts[2:-1], NUM_SEQUENCES, each)
    assert_binomial(counts[-1], NUM_SEQUENCES, 1 - fraction + each)


def test_a_short_sequence_begins_anywhere_in_its_window():
    batch = replace(SEQUENCES, short_fraction=1.0, sentence_order=False).take(ALL, epoch=0)
    is_known = (batch["predicted"] != 1).all(axis=1)  # the first word of the text is as it was
    begin = ((batch["tokens"][:, 1] - NUM_SPECIAL) % WINDOW)[is_known]
    last = WINDOW - num_tokens(batch)[is_known]
    probability = 1 / (last + 1)
    deviation = np.sqrt((probability * (1 - probability)).sum())
    for num_found in ((begin == 0).sum(), (begin == last).sum()):
        assert abs(num_found - probability.sum()) <= 5 * deviation
