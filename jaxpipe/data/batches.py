"""Which sequences make the batch of a step: a pure function of (sequences, seed, step).

So a run that starts again at any step sees what it would have seen. The sequences of a batch do not
depend on the number of microbatches, only their grouping does. Left to others: what a sequence is (`sequences`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxpipe.data.sequences import Batch, Sequences


@dataclass(frozen=True)
class Batches:
    """Batches of sequences; every epoch takes them in another order.

    Attributes:
        sequences: of one text.
        batch_size: sequences of one step; `num_microbatches` divides it.
        num_microbatches: microbatches of one step.
        seed: decides the order.

    Example:
        >>> from jaxpipe.data import CausalSequences
        >>> sequences = CausalSequences(np.arange(100), seq_len=4)
        >>> batches = Batches(sequences, batch_size=6, num_microbatches=3, seed=0)
        >>> batches.at(0)["tokens"].shape
        (3, 2, 4)
    """

    sequences: Sequences
    batch_size: int
    num_microbatches: int
    seed: int

    def at(self, step: int) -> Batch:
        """The batch of `step`: int32 arrays "num_microbatches microbatch_size ...", as the sequences have them.

        An epoch leaves out the sequences that do not fill a batch; another order leaves out others.
        """
        epoch, index = divmod(step, self.sequences.num_sequences // self.batch_size)
        order = _order(self.seed, epoch, self.sequences.num_sequences)
        indices = order[index * self.batch_size : (index + 1) * self.batch_size]
        return self._grouped(self.sequences.take(indices, epoch=epoch))

    def first(self, num_batches: int) -> Iterator[Batch]:
        """At most `num_batches` batches without repeating a sequence, for evaluation: always the same ones.

        Where the sequences end before a batch is full, the rest of it counts for nothing.
        """
        order = _order(self.seed, 0, self.sequences.num_sequences)
        for start in range(0, min(num_batches * self.batch_size, len(order)), self.batch_size):
            taken = self.sequences.take(order[start : start + self.batch_size], epoch=0)
            filling = self.sequences.fill(max(0, start + self.batch_size - len(order)))
            yield self._grouped({name: np.concatenate([taken[name], filling[name]]) for name in taken})

    def _grouped(self, batch: Batch) -> Batch:
        size = (self.num_microbatches, self.batch_size // self.num_microbatches)
        return {name: values.reshape(*size, *values.shape[1:]) for name, values in batch.items()}


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_sequences: int) -> np.ndarray:
    """The order of an epoch, drawn once for all its steps."""
    # RandomState, because NumPy promises that its stream never changes between versions.
    order = np.random.RandomState([seed, epoch]).permutation(num_sequences)
    order.flags.writeable = False
    return order
