"""Transforms put every number where the layout says, and their two ways are inverse."""

import numpy as np
import pytest

from jaxpipe.huggingface import mapping
from jaxpipe.models import Anatomy

ANATOMY = Anatomy(hidden=4, num_heads=6, width=7, num_up=1, num_kv_heads=2, head_size=3, vocab_size=5, num_rows=8)
HIDDEN, NUM_QUERIES = 4, 6

# Transform, and shapes of its tensors.
CASES = {
    "same": (mapping.SAME, [(4, 7)]),
    "transposed": (mapping.TRANSPOSED, [(4, 7)]),
    "token_rows": (mapping.TOKEN_ROWS, [(5, 4)]),
    "token_rows_bias": (mapping.TOKEN_ROWS, [(5,)]),
    "separate_weights": (mapping.SEPARATE_QKV_WEIGHTS, [(18, HIDDEN), (6, HIDDEN), (6, HIDDEN)]),
    "separate_biases": (mapping.SEPARATE_QKV_BIASES, [(18,), (6,), (6,)]),
    "fused": (mapping.FUSED_QKV, [(HIDDEN, 18)]),
    "fused_bias": (mapping.FUSED_QKV, [(18,)]),
}


def numbers(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", CASES)
def test_the_two_ways_are_inverse(name):
    transform, shapes = CASES[name]
    tensors = tuple(numbers(shape, seed) for seed, shape in enumerate(shapes))
    array = transform.to_ours(tensors, ANATOMY)
    for tensor, back in zip(tensors, transform.to_theirs(array, ANATOMY), strict=True):
        np.testing.assert_array_equal(back, tensor)


def test_rows_beyond_the_vocabulary_are_zeros():
    tensor = numbers((5, 4), 0)
    array = mapping.TOKEN_ROWS.to_ours((tensor,), ANATOMY)
    np.testing.assert_array_equal(array, [*tensor, *np.zeros((3, 4))])


def test_columns_stand_by_key_value_head():
    weights = [numbers(shape, seed) for seed, shape in enumerate([(18, HIDDEN), (6, HIDDEN), (6, HIDDEN)])]
    queries, keys, values = (list(weight.reshape(-1, 3, HIDDEN)) for weight in weights)  # heads, each of 3 rows
    heads = [*queries[:3], keys[0], values[0], *queries[3:], keys[1], values[1]]
    expected = np.concatenate(heads).T
    np.testing.assert_array_equal(mapping.SEPARATE_QKV_WEIGHTS.to_ours(tuple(weights), ANATOMY), expected)


def test_the_columns_of_a_conv1d_stand_head_by_head():
    weight = numbers((HIDDEN, 18), 0)
    heads = [weight[:, 3 * index : 3 * index + 3] for index in range(6)]  # two of queries, of keys, of values
    expected = np.concatenate([heads[index] for index in (0, 2, 4, 1, 3, 5)], axis=1)
    np.testing.assert_array_equal(mapping.FUSED_QKV.to_ours((weight,), ANATOMY), expected)
