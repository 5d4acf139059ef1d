"""Sums over `data` and other axes: the gradients of a chunk, in the round after the action that completes them.

By then the action's message has left: else each stage would wait at the end of the step for the sums of all before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer


@dataclass(frozen=True, eq=False)
class CompletionGrids:
    """The actions that are the last to add to the gradients of their chunk."""

    completes: np.ndarray  # [R, D]
    chunk: np.ndarray  # [R, D]


class SumsOverData(Transfer[RoundTable]):
    """What devices of one index of `pipe` add up; nothing of it travels along `pipe`."""

    name = "sums_over_data"

    def payloads(self, table: RoundTable) -> Payloads:
        """None along `pipe`."""
        none = np.zeros(0, int)
        return Payloads(none, none, none, none, size=1)

    def works_in(self, table: RoundTable) -> np.ndarray:
        """A chunk is summed in the round after it is complete; one that the last round completes, after that."""
        # The first round follows none.
        return np.append(False, table.completes[:-1].any(axis=1))

    def grids(self, table: RoundTable) -> CompletionGrids:
        """What completes, and where."""
        return CompletionGrids(table.completes, table.chunk)


SUMS_OVER_DATA = SumsOverData()
