"""Which sequences make the batch of a step: a pure function of (tokens, seed, step).

So a run that starts again at any step sees what it would have seen. The sequences of a batch do not
depend on the number of microbatches, only their grouping does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Batches:
    """Batches of non-overlapping sequences; every epoch takes them in another order.

    Attributes:
        tokens: "tokens"; at least `seq_len + 1`.
        seq_len: tokens of one sequence.
        batch_size: sequences of one step; `num_microbatches` divides it.
        num_microbatches: microbatches of one step.
        seed: decides the order.

    Example:
        >>> batches = Batches(np.arange(100), seq_len=4, batch_size=6, num_microbatches=3, seed=0)
        >>> batches.at(0)["tokens"].shape
        (3, 2, 4)
    """

    tokens: np.ndarray
    seq_len: int
    batch_size: int
    num_microbatches: int
    seed: int

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch; each has a next token for its last one."""
        return (len(self.tokens) - 1) // self.seq_len

    def at(self, step: int) -> Batch:
        """The batch of `step`: "tokens" and "targets", each "num_microbatches microbatch_size seq", int32.

        An epoch leaves out the sequences that do not fill a batch; another order leaves out others.
        """
        epoch, index = divmod(step, self.num_sequences // self.batch_size)
        return self._batch(self._order(epoch)[index * self.batch_size : (index + 1) * self.batch_size])

    def first(self, num_batches: int) -> Iterator[Batch]:
        """At most `num_batches` batches without repeating a sequence, for evaluation.

        Where the sequences end before a batch is full, its other targets are -1, not valid.
        """
        order = self._order(0)
        for start in range(0, min(num_batches * self.batch_size, len(order)), self.batch_size):
            yield self._batch(order[start : start + self.batch_size])

    def _order(self, epoch: int) -> np.ndarray:
        # RandomState, because NumPy promises that its stream never changes between versions.
        return np.random.RandomState([self.seed, epoch]).permutation(self.num_sequences)

    def _batch(self, sequences: np.ndarray) -> Batch:
        position = sequences[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        window = self.tokens[position].astype(np.int32)
        missing = self.batch_size - len(sequences)
        tokens = np.pad(window[:, :-1], ((0, missing), (0, 0)))
        targets = np.pad(window[:, 1:], ((0, missing), (0, 0)), constant_values=-1)
        shape = (self.num_microbatches, self.batch_size // self.num_microbatches, self.seq_len)
        return {"tokens": tokens.reshape(shape), "targets": targets.reshape(shape)}
