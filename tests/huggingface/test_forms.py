"""Forms put every number where the layout says, and their two ways are inverse."""

import numpy as np
import pytest

from jaxpipe.huggingface import forms

SIZES = forms.Sizes(num_groups=2, head_size=3, vocab_size=5, num_rows=8)
HIDDEN, NUM_QUERIES = 4, 6

# Form, and shapes of its tensors.
CASES = {
    "same": (forms.SAME, [(4, 7)]),
    "transposed": (forms.TRANSPOSED, [(4, 7)]),
    "words": (forms.WORDS, [(5, 4)]),
    "words_bias": (forms.WORDS, [(5,)]),
    "three_weights": (forms.THREE_WEIGHTS, [(18, HIDDEN), (6, HIDDEN), (6, HIDDEN)]),
    "three_biases": (forms.THREE_BIASES, [(18,), (6,), (6,)]),
    "side_by_side": (forms.SIDE_BY_SIDE, [(HIDDEN, 18)]),
    "side_by_side_bias": (forms.SIDE_BY_SIDE, [(18,)]),
}


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", CASES)
def test_the_two_ways_are_inverse(name):
    form, shapes = CASES[name]
    tensors = tuple(numbers(shape, seed) for seed, shape in enumerate(shapes))
    array = form.to_ours(tensors, SIZES)
    for tensor, back in zip(tensors, form.to_theirs(array, SIZES), strict=True):
        np.testing.assert_array_equal(back, tensor)


def test_rows_beyond_the_words_are_zeros():
    tensor = numbers((5, 4), 0)
    array = forms.WORDS.to_ours((tensor,), SIZES)
    np.testing.assert_array_equal(array, [*tensor, *np.zeros((3, 4))])


def test_columns_stand_by_key_value_head():
    weights = [numbers(shape, seed) for seed, shape in enumerate([(18, HIDDEN), (6, HIDDEN), (6, HIDDEN)])]
    queries, keys, values = (list(weight.reshape(-1, 3, HIDDEN)) for weight in weights)  # heads, each of 3 rows
    heads = [*queries[:3], keys[0], values[0], *queries[3:], keys[1], values[1]]
    expected = np.concatenate(heads).T
    np.testing.assert_array_equal(forms.THREE_WEIGHTS.to_ours(tuple(weights), SIZES), expected)


def test_the_columns_of_a_conv1d_stand_head_by_head():
    weight = numbers((HIDDEN, 18), 0)
    heads = [weight[:, 3 * index : 3 * index + 3] for index in range(6)]  # two of queries, of keys, of values
    expected = np.concatenate([heads[index] for index in (0, 2, 4, 1, 3, 5)], axis=1)
    np.testing.assert_array_equal(forms.SIDE_BY_SIDE.to_ours((weight,), SIZES), expected)
