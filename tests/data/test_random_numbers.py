"""Random numbers: Philox's own, at an address that nothing else moves."""

import numpy as np

from jaxpipe.data.masked import integers, random_bits, uniform

WORD = 2**64


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Salmon et al. 2011, section 3.3 and table 2, in whole numbers."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c0, WORD)
        high1, low1 = divmod(0xCA5A826395121157 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) % WORD, (k1 + 0xBB67AE8584CAA73B) % WORD
    return [c0, c1, c2, c3]


def test_the_rounds_above_give_what_random123_publishes():
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]  # its kat_vectors
    assert philox4x64([0, 0, 0, 0], [0, 0]) == expected


def test_the_seed_and_epoch_are_the_key_and_the_sequence_is_in_the_counter():
    bits = random_bits(7, 3, np.array([5, 0, 2**40]), num_per_sequence=9)
    for row, sequence in zip(bits, (5, 0, 2**40), strict=True):
        blocks = [philox4x64([block, sequence, 0, 0], [7, 3]) for block in (1, 2, 3)]  # NumPy counts before it draws
        assert row.tolist() == [word for block in blocks for word in block][:9]


def test_uniform_numbers_and_integers_keep_to_their_ends():
    ends = np.array([0, WORD - 1], np.uint64)
    assert uniform(ends).tolist() == [0.0, 1.0 - 2.0**-53]
    assert integers(ends, 3, 9).tolist() == [3, 9]
    assert integers(ends, 3, np.array([3, 2**31])).tolist() == [3, 2**31]
