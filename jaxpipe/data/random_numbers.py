"""Random numbers that are addressed by (seed, epoch, sequence), so that no sequence depends on another.

Goes in: a seed, an epoch and sequences. Comes out: uniform numbers, the same on every machine and with every version of
NumPy: NumPy guarantees the raw stream of a bit generator, but not what its Generator makes of the stream.
"""

from __future__ import annotations

import numpy as np


def random_bits(seed: int, epoch: int, sequences: np.ndarray, *, num_per_sequence: int) -> np.ndarray:
    """Returns random numbers for each of `sequences`, uniform in 0 .. 2^64 - 1: "sequence number", uint64.

    Args:
        seed: first half of the generator's key, in 0 .. 2^64 - 1.
        epoch: second half of the generator's key, in 0 .. 2^64 - 1.
        sequences: "sequence"; each is the second word of the generator's counter, whose first word counts its numbers.
        num_per_sequence: numbers for each sequence.

    Source: Philox4x64 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", as implemented by NumPy.
    """
    key = np.array([seed, epoch], np.uint64)
    bits = np.empty((len(sequences), num_per_sequence), np.uint64)
    for row, sequence in zip(bits, sequences, strict=True):
        generator = np.random.Philox(key=key, counter=np.array([0, sequence, 0, 0], np.uint64))
        row[:] = generator.random_raw(num_per_sequence)
    return bits


def uniform(bits: np.ndarray) -> np.ndarray:
    """Random bits as float64 in [0, 1): their upper 53 bits, all that a float64 holds."""
    return (bits >> np.uint64(11)) * 2.0**-53


def integers(bits: np.ndarray, low: int | np.ndarray, high: int | np.ndarray) -> np.ndarray:
    """Random bits as int64 in low .. high, both included; `low` and `high` broadcast.

    Example:
        >>> integers(np.array([0, 2**63, 2**64 - 1], np.uint64), 1, 6)
        array([1, 4, 6])
    """
    return low + (uniform(bits) * (high - low + 1)).astype(np.int64)
