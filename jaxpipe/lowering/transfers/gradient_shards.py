"""Gradients of layers that each action sums over `data`, of which devices keep their part alone.

The sum of a layer travels while the next layer of that backward computes, that of its last layer while the device's
next such action begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.spread import SUMMING_KINDS
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer


@dataclass(frozen=True, eq=False)
class FlushGrids:
    """Whether a round sums what an action has left."""

    sums: np.ndarray  # [R, D] 0 or 1


class GradientShards(Transfer[RoundTable]):
    """What devices of one index of `pipe` add up; nothing of it travels along `pipe`."""

    name = "gradient_shards"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On all actions that make gradients of matrices."""
        return np.isin(table.kind, SUMMING_KINDS)

    def works_in(self, table: RoundTable) -> np.ndarray:
        """Where a round sums what is left."""
        return table.grids[self.name].sums.any(axis=1)

    def grids(self, table: RoundTable) -> FlushGrids:
        """The round after an action that completes a chunk, where its sums go to the other holder at once."""
        sums = np.zeros_like(table.completes)
        if table.schedule.num_replicas > 1:
            sums[1:] = table.completes[:-1]
        return FlushGrids(sums)


GRADIENT_SHARDS = GradientShards()
