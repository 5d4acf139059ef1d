"""What `Batches` asks of the sequences that it orders and groups; `CausalSequences` and `MaskedSequences` are such."""

from __future__ import annotations

from typing import Protocol

import numpy as np

Batch = dict[str, np.ndarray]


class Sequences(Protocol):
    """The examples that one epoch takes from a text."""

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        ...

    def take(self, indices: np.ndarray, *, epoch: int) -> Batch:
        """The sequences `indices` as `epoch` sees them: int32 arrays "sequence ...", a row for each index.

        A row depends on its own index and on `epoch`, not on what else is taken.

        Args:
            indices: "sequence", each less than `num_sequences`.
            epoch: which pass over the text.
        """
        ...

    def fill(self, num_sequences: int) -> Batch:
        """So many rows like those of `take` that count for nothing in a loss, for a batch that is not full."""
        ...
