"""Random numbers with an address: those of a sequence in an epoch, whatever else is drawn before or beside them.

Goes in: seed, epoch and sequences. Comes out: uniform numbers, the same on every machine and with every version of
NumPy, which promises raw streams of bit generators and not what its Generator makes of them.
"""

from __future__ import annotations

import numpy as np


def raw_draws(seed: int, epoch: int, sequences: np.ndarray, *, num_draws: int) -> np.ndarray:
    """For each of `sequences` its own uniform numbers in 0 .. 2^64 - 1: "sequence draw", uint64.

    Args:
        seed: in 0 .. 2^64 - 1, as epoch.
        epoch: together with the seed the key of the generator.
        sequences: "sequence"; a sequence is the second word of the generator's counter, of which the first one counts.
        num_draws: of a sequence.

    Source: Philox4x64 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", as NumPy has it.
    """
    key = np.array([seed, epoch], np.uint64)
    draws = np.empty((len(sequences), num_draws), np.uint64)
    for row, sequence in zip(draws, sequences, strict=True):
        row[:] = np.random.Philox(key=key, counter=np.array([0, sequence, 0, 0], np.uint64)).random_raw(num_draws)
    return draws


def uniform(raw: np.ndarray) -> np.ndarray:
    """Raw draws as float64 in [0, 1): their upper 53 bits, all that a float64 holds."""
    return (raw >> np.uint64(11)) * 2.0**-53


def integers(raw: np.ndarray, low: int | np.ndarray, high: int | np.ndarray) -> np.ndarray:
    """Raw draws as int64 in low .. high, both included; `low` and `high` broadcast."""
    return low + (uniform(raw) * (high - low + 1)).astype(np.int64)
