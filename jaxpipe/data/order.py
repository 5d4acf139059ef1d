"""Which sequence stands where in the endless order of a run: a pure function of (sizes, weights, seed, place).

So a run goes on at any place at once, and it does not matter how many processes read, or what a batch is.
Goes in: how many sequences each source has. Comes out: for a place the source, its epoch and the sequence. Left to
others: what a sequence is (`sequences`), and how many make a batch (`batches`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

import grain
import numpy as np

from jaxpipe.errors import ConfigError

MOST_SEQUENCES = 2**32  # Grain's shuffle counts in 32 bits


@dataclass(frozen=True)
class Order:
    """All sequences of all sources, each once an epoch of its source; every epoch has another order.

    Two sources of weight 2 and 1, of four sequences and of two; both end an epoch with place 5:

        place      0   1   2   3   4   5   6   7   8 ...
        source     0   0   1   0   0   1   0   0   1
        epoch      0   0   0   0   0   0   1   1   1
        sequence   3   0   1   1   2   0   3   0   0

    Up to any place a source has had its share of the sequences, give or take one for each source besides.

    Attributes:
        num_sequences: of each source, 1 .. 2^32.
        weights: of each source, positive; a share is a weight over the sum of all.
        seed: decides the orders of all epochs of all sources, in 0 .. 2^32 - 1.

    Source: Grain's `MapDataset.shuffle` needs no memory: a block cipher (SIMON) on the index, applied again until it
    falls below the size. Its blocks have at least 16 bits, so an epoch of however few sequences costs some 20 ms of a
    CPU core; a sequence, with all else here, some 10 us. Shares are as Grain's `MapDataset.mix` has them, of exact
    weights: its own are rounded, by up to a percent.
    """

    num_sequences: tuple[int, ...]
    weights: tuple[Fraction, ...]
    seed: int

    def __post_init__(self):
        if max(self.num_sequences) > MOST_SEQUENCES:
            raise ConfigError(
                f"a source of data.files has {max(self.num_sequences)} sequences\n"
                "  rule countable-sequences: a source has at most 2^32 sequences\n"
                f"      {max(self.num_sequences)} > {MOST_SEQUENCES}\n"
                "  repair: set a larger data.seq_len, or blend several smaller prepared files"
            )

    def at(self, places: np.ndarray) -> np.ndarray:
        """Source, epoch and sequence of each of `places` "place", any of 0, 1, 2, ...: "place 3", int64."""
        return np.array([self._address(place) for place in places.tolist()], np.int64).reshape(-1, 3)

    def _address(self, place: int) -> tuple[int, int, int]:
        source, index = self._source(place)
        sequence = self._shuffled[source][index]
        assert sequence is not None  # only Grain's filters leave any out
        return source, index // self.num_sequences[source], sequence

    def _source(self, place: int) -> tuple[int, int]:
        """Which source `place` belongs to, and how many places before it do."""
        # Source by source: of the places up to `place`, without it and with it, how many are left to those behind.
        without, within, remaining = place, place + 1, sum(self._shares)
        for source, share in enumerate(self._shares[:-1]):
            left_without, left_within = (num * (remaining - share) // remaining for num in (without, within))
            if left_without == left_within:
                return source, without - left_without
            without, within, remaining = left_without, left_within, remaining - share
        return len(self._shares) - 1, without

    @cached_property
    def _shares(self) -> list[int]:
        """Whole numbers in the proportion of the weights."""
        denominator = lcm(*(weight.denominator for weight in self.weights))
        return [int(weight * denominator) for weight in self.weights]

    @cached_property
    def _shuffled(self) -> list[grain.MapDataset[int]]:
        """For each source all its sequences, epoch behind epoch."""
        return [
            grain.MapDataset.range(size).shuffle(seed=_seed(self.seed, source)).repeat()
            for source, size in enumerate(self.num_sequences)
        ]


def _seed(seed: int, source: int) -> int:
    """The 32 bits that Grain shuffles a source with; it counts them up from epoch to epoch."""
    # Of a hash, so that no epoch of one seed or source is an epoch of the next one.
    return int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:4], "little")
