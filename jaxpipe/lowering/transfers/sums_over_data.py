"""Sums over `data` and other axes: the gradients of a chunk, behind the layers of the action that completes them.

The sum of a layer travels while the next layer of that action computes, that of its last layer while the next
completing action of the device begins. Where nothing hangs on layers, a whole chunk is summed in the round after the
action: by then its message has left, else each stage would wait at the end of the step for the sums of all before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer


@dataclass(frozen=True, eq=False)
class CompletionGrids:
    """What each device sums in the round after this one."""

    # 1: the chunk of the action, which is complete; behind layers what is left of it, the last layer of the action.
    completes: np.ndarray  # [R, D]
    chunk: np.ndarray  # [R, D]


@dataclass(frozen=True)
class SumsOverData(Transfer[RoundTable]):
    """What devices of one index of `pipe` add up; nothing of it travels along `pipe`."""

    behind_layers: bool = False

    name = "sums_over_data"

    def payloads(self, table: RoundTable) -> Payloads:
        """None along `pipe`."""
        none = np.zeros(0, int)
        return Payloads(none, none, none, none, size=1)

    def hangs(self, table: RoundTable) -> np.ndarray | None:
        """On the actions that complete a chunk."""
        return table.completes == 1 if self.behind_layers else None

    def works_in(self, table: RoundTable) -> np.ndarray:
        """A round sums what the round before has left; what the last round leaves is summed after it."""
        # The first round follows none.
        return np.append(False, table.grids[self.name].completes[:-1].any(axis=1))

    def grids(self, table: RoundTable) -> CompletionGrids:
        """What completes, and where."""
        completes = table.completes
        # With one replica a chunk's last layer waits for the device's next completing action. With two, gradients
        # travel to the other holder from the second round on.
        if self.behind_layers and table.schedule.num_replicas == 1:
            later = np.cumsum(completes[::-1], axis=0)[::-1] - completes
            completes = completes * (later == 0)
        return CompletionGrids(completes, table.chunk)


SUMS_OVER_DATA = SumsOverData()
SUMS_BEHIND_LAYERS = SumsOverData(behind_layers=True)
