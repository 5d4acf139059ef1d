"""Which sequences make the batch of a step: a pure function of (sources, weights, seed, step).

So a run that starts again at any step sees what it would have seen, and each process of a run makes only the rows that
its devices need. The sequences of a batch do not depend on the number of microbatches, only their grouping does. Left
to others: what a sequence is (`sequences`), and in which order they come (`order`).
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import grain
import numpy as np

from jaxpipe.data.order import Order
from jaxpipe.data.sequences import Batch, Sequences

NUM_THREADS = 2
NUM_AHEAD = 4  # batches


@dataclass(frozen=True)
class Batches:
    """Batches of sequences, one behind the other without regard to epochs, each of which has another order.

    A batch may end one epoch and begin the next.

    Attributes:
        sources: sequences of a text each.
        batch_size: sequences of one step; `num_microbatches` divides it.
        num_microbatches: microbatches of one step.
        seed: decides the order.
        weights: of each source; its share of the sequences is its weight over the sum of all.

    Example:
        >>> from jaxpipe.data import CausalSequences
        >>> sequences = CausalSequences(np.arange(100), seq_len=4)
        >>> batches = Batches((sequences,), batch_size=6, num_microbatches=3, seed=0)
        >>> batches.at(0)["tokens"].shape
        (3, 2, 4)
        >>> batches.at(0, rows=np.array([1]))["tokens"].shape
        (3, 1, 4)
    """

    sources: tuple[Sequences, ...]
    batch_size: int
    num_microbatches: int
    seed: int
    weights: tuple[Fraction, ...] = (Fraction(1),)

    def at(self, step: int, rows: np.ndarray | None = None) -> Batch:
        """The batch of `step`: int32 arrays "num_microbatches microbatch_size ...", as the sequences have them.

        Args:
            step: 0 or more; none costs more than another.
            rows: "row", which of `microbatch_size` to make; None makes all.

        Raises:
            DataError: a file holds what the model has no words for.
        """
        places = self._places(step)
        places = places if rows is None else places[:, rows]
        taken = self._take(self._order.at(places.ravel()))
        return {name: values.reshape(*places.shape, *values.shape[1:]) for name, values in taken.items()}

    def following(self, step: int, rows: np.ndarray | None = None) -> Generator[Batch, None, None]:
        """The batches of `step`, `step` + 1, ... without end, made ahead in background threads.

        What goes wrong in one of them is raised here, at the batch that it belongs to. `close` ends them.

        Args:
            step: the first one.
            rows: as of `at`.
        """
        batches = grain.MapDataset.range(step, sys.maxsize).map(lambda step: self.at(step, rows))
        ahead = iter(batches.to_iter_dataset(grain.ReadOptions(NUM_THREADS, NUM_AHEAD)))
        try:
            yield from ahead
        finally:
            ahead.close()

    def first(self, num_batches: int) -> Iterator[Batch]:
        """At most `num_batches` batches without repeating a sequence, for evaluation: always the same ones.

        They end where a source would begin its second epoch, so that each has its share. The rest of a batch that is
        not full counts for nothing.
        """
        for step in range(num_batches):
            places = self._places(step)
            addresses = self._order.at(places.ravel())
            (repeated,) = addresses[:, 1].nonzero()
            num_new = repeated[0] if len(repeated) else self.batch_size
            if num_new == 0:
                return
            taken = self._take(addresses[:num_new])
            filling = self.sources[0].fill(self.batch_size - num_new)
            yield {
                name: np.concatenate([taken[name], filling[name]]).reshape(*places.shape, *taken[name].shape[1:])
                for name in taken
            }
            if num_new < self.batch_size:
                return

    @cached_property
    def _order(self) -> Order:
        return Order(tuple(source.num_sequences for source in self.sources), self.weights, self.seed)

    def _places(self, step: int) -> np.ndarray:
        """The places of a step in the order, "num_microbatches microbatch_size"."""
        return step * self.batch_size + np.arange(self.batch_size).reshape(self.num_microbatches, -1)

    def _take(self, addresses: np.ndarray) -> Batch:
        """The sequences at `addresses` "sequence 3", in their order."""
        groups, group = np.unique(addresses[:, :2], axis=0, return_inverse=True)
        parts = [
            self.sources[source].take(addresses[group == index, 2], epoch=int(epoch))
            for index, (source, epoch) in enumerate(groups)
        ]
        back = np.argsort(np.argsort(group, kind="stable"))
        return {name: np.concatenate([part[name] for part in parts])[back] for name in parts[0]}
