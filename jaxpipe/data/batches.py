"""The batches of a run: the sequences of a step are a pure function of (sources, weights, seed, step).

All sequences of a run have an endless order, which `SequenceOrder` computes position by position; a batch is a range
of positions. So a run that starts again at any step sees what it would have seen, and each process of a run makes only
the rows that its devices need. The sequences of a batch do not depend on the number of microbatches, only their
grouping does. Left to others: what a sequence is (`protocols.Sequences`).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import lcm

import grain
import numpy as np

from jaxpipe.data.protocols import Batch, Sequences
from jaxpipe.errors import ConfigError

NUM_THREADS = 2
NUM_AHEAD = 4  # batches
PREDICTED = {"targets", "sentence_order"}  # arrays of a batch: what is to be predicted, -1 for nothing
MAX_SEQUENCES = 2**32  # Grain's shuffle counts in 32 bits


@dataclass(frozen=True)
class Batches:
    """Batches of sequences, one after the other across epochs, each of which has another order.

    A batch may end one epoch and begin the next.

    Example:
        >>> from jaxpipe.data import CausalSequences
        >>> sequences = CausalSequences(np.arange(100), seq_len=4)
        >>> batches = Batches((sequences,), batch_size=6, num_microbatches=3, seed=0)
        >>> batches.at(0)["tokens"].shape
        (3, 2, 4)
        >>> batches.at(0, rows=np.array([1]))["tokens"].shape
        (3, 1, 4)
    """

    sources: tuple[Sequences, ...]  # the sequences of each source
    batch_size: int  # sequences of one step; `num_microbatches` divides it
    num_microbatches: int  # microbatches of one step
    seed: int  # determines the order
    # The weight of each source; a source's share of the sequences is its weight over the sum of all.
    weights: tuple[Fraction, ...] = (Fraction(1),)

    def at(self, step: int, rows: np.ndarray | None = None) -> Batch:
        """Returns the batch of `step`: int32 arrays "num_microbatches microbatch_size ...".

        Args:
            step: 0 or more; every step costs the same.
            rows: "row", which of the `microbatch_size` rows to make; None makes all.

        Raises:
            DataError: a file contains a token outside the model's vocabulary.
        """
        positions = self._positions(step)
        positions = positions if rows is None else positions[:, rows]
        taken = self._take(self._order.at(positions.ravel()))
        return {name: values.reshape(*positions.shape, *values.shape[1:]) for name, values in taken.items()}

    def following(self, step: int, rows: np.ndarray | None = None) -> Generator[Batch, None, None]:
        """Yields the batches of `step`, `step` + 1, ... without end, prepared ahead in background threads.

        An error in a thread is raised here, when its batch is asked for. `close` ends the threads.
        """
        # As many steps as there are numbers: batches have no end.
        batches = grain.MapDataset.range(step, sys.maxsize).map(lambda step: self.at(step, rows))
        ahead = iter(batches.to_iter_dataset(grain.ReadOptions(NUM_THREADS, NUM_AHEAD)))
        try:
            yield from ahead
        finally:
            # Also where a step fails: the threads would prepare on.
            ahead.close()

    def first(self, num_batches: int) -> Iterator[Batch]:
        """Yields at most `num_batches` batches in which no sequence repeats: always the same ones, for evaluation.

        The batches end where some source would begin its second epoch, so that every source keeps its share. The rest
        of a batch that is not full has no weight in the loss; it repeats the rows before, so that
        the routers of a mixture see real tokens alone.
        """
        for step in range(num_batches):
            positions = self._positions(step)
            addresses = self._order.at(positions.ravel())
            (repeated,) = addresses[:, 1].nonzero()
            # Sequences of a second epoch repeat; all before them are new.
            num_new = repeated[0] if len(repeated) else self.batch_size
            if num_new == 0:
                return
            taken = self._take(addresses[:num_new])
            taken = {name: values[np.arange(self.batch_size) % num_new] for name, values in taken.items()}
            for name in PREDICTED & taken.keys():
                # -1 is no target, so the rows that repeat count nothing.
                taken[name][num_new:] = -1
            yield {name: values.reshape(*positions.shape, *values.shape[1:]) for name, values in taken.items()}
            if num_new < self.batch_size:
                return

    @cached_property
    def _order(self) -> SequenceOrder:
        return SequenceOrder(tuple(source.num_sequences for source in self.sources), self.weights, self.seed)

    def _positions(self, step: int) -> np.ndarray:
        """Positions of a step in the order of all sequences, "num_microbatches microbatch_size"."""
        return step * self.batch_size + np.arange(self.batch_size).reshape(self.num_microbatches, -1)

    def _take(self, addresses: np.ndarray) -> Batch:
        """Returns the sequences at `addresses` "sequence 3", in their order."""
        # Sequences of one source and epoch are taken together; `back` undoes the grouping.
        groups, group = np.unique(addresses[:, :2], axis=0, return_inverse=True)
        parts = [
            self.sources[source].take(addresses[group == index, 2], epoch=int(epoch))
            for index, (source, epoch) in enumerate(groups)
        ]
        # The argsort of a permutation is its inverse.
        back = np.argsort(np.argsort(group, kind="stable"))
        return {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]}


@dataclass(frozen=True)
class SequenceOrder:
    """The order of all sequences of all sources: each once per epoch of its source, differently in every epoch.

    Two sources with weights 2 and 1, of four sequences and of two; both end an epoch at position 5:

        position   0   1   2   3   4   5   6   7   8 ...
        source     0   0   1   0   0   1   0   0   1
        epoch      0   0   0   0   0   0   1   1   1
        sequence   3   0   1   1   2   0   3   0   0

    Up to any position each source has had its share of the sequences, to within one for each other source.

    Source: Grain's `MapDataset.shuffle` needs no memory: a block cipher (SIMON) on the index, repeated until the result
    is below the size. Its blocks have at least 16 bits, so an epoch of even a few sequences costs about 20 ms of a
    CPU core; a sequence, with everything else here, about 10 us. Shares are interleaved as by Grain's `MapDataset.mix`,
    but with exact weights: Grain rounds them, by up to a percent.
    """

    num_sequences: tuple[int, ...]  # the number of sequences of each source, 1 .. 2^32
    # The weight of each source, positive; a source's share is its weight over the sum of all.
    weights: tuple[Fraction, ...]
    seed: int  # determines the order of every epoch of every source, in 0 .. 2^32 - 1

    def __post_init__(self):
        if max(self.num_sequences) > MAX_SEQUENCES:
            raise ConfigError(
                f"a source of data.files has {max(self.num_sequences)} sequences",
                rule="countable-sequences: a source has at most 2^32 sequences",
                picture=f"{max(self.num_sequences)} > {MAX_SEQUENCES}",
                repair="set a larger data.seq_len, or blend several smaller prepared files",
            )

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Returns source, epoch and sequence at each of `positions`, "position 3", int64."""
        return np.array([self._address(position) for position in positions.tolist()], np.int64).reshape(-1, 3)

    def _address(self, position: int) -> tuple[int, int, int]:
        source, index = self._source(position)
        sequence = self._shuffled[source][index]
        assert sequence is not None  # only Grain's filters leave any out
        return source, index // self.num_sequences[source], sequence

    def _source(self, position: int) -> tuple[int, int]:
        """Returns the source at `position`, and how many positions before it belong to that source."""
        # `without` and `within` count the positions before this one, without it and with it, that belong to the sources
        # not yet looked at. A source takes its share of them; this position is its own where both leave equally many.
        #   shares 2 and 1, position 4: of 4 and of 5 positions the second source has 1 and 1, so it is the first's
        without = position
        within = position + 1
        remaining = sum(self._shares)
        for source, share in enumerate(self._shares[:-1]):
            # Whole numbers: a share would be off by one somewhere if the ratio were rounded.
            left_without, left_within = (num * (remaining - share) // remaining for num in (without, within))
            if left_without == left_within:
                return source, without - left_without
            without = left_without
            within = left_within
            remaining -= share
        return len(self._shares) - 1, without

    @cached_property
    def _shares(self) -> list[int]:
        """Whole numbers in the proportion of the weights."""
        denominator = lcm(*(weight.denominator for weight in self.weights))
        return [int(weight * denominator) for weight in self.weights]

    @cached_property
    def _shuffled(self) -> list[grain.MapDataset[int]]:
        return [
            grain.MapDataset.range(size).shuffle(seed=_seed(self.seed, source)).repeat()
            for source, size in enumerate(self.num_sequences)
        ]


def _seed(seed: int, source: int) -> int:
    """The 32 bits with which Grain shuffles a source; Grain adds the epoch to them."""
    # A hash, so that the epochs of one seed or source are not those of the next, one epoch later.
    # 32 bits, all that Grain's seed has.
    return int.from_bytes(hashlib.sha256(f"{seed} {source}".encode()).digest()[:4], "little")
