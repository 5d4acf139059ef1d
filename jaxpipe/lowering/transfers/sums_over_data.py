"""Sums over `data` and other axes: what is complete and not summed behind layers (`layer_sums`), in the round after.

Then the message of the action that completes it has left, and nobody waits behind the sum.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers.layer_sums import LayerSums, summed_behind_layers
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Schedule


class Left(enum.IntEnum):
    """What a round leaves for the next one to sum."""

    NOTHING = 0
    CHUNK = 1  # all layers of a chunk
    LAYER = 2  # its first layer, since all others have been summed behind layers


@dataclass(frozen=True, eq=False)
class CompletionGrids:
    """What each device sums in the round after this one."""

    left: np.ndarray  # [R, D] Left
    chunk: np.ndarray  # [R, D] the chunk of which it is left


class SumsOverData(Transfer[RoundTable]):
    """What devices of one index of `pipe` add up; nothing of it travels along `pipe`."""

    name = "sums_over_data"

    def is_asked_for(self, schedule: Schedule) -> bool:
        """Wherever gradients are summed; without flush the updates of layers do it."""
        return not schedule.delays and bool(schedule.columns.is_kind(*BACKWARD_KINDS).any())

    def works_in(self, table: RoundTable) -> np.ndarray:
        """A round sums what the round before has left; what the last round leaves is summed after it."""
        # The first round follows none.
        return np.append(False, table.grids[self.name].left[:-1].any(axis=1))

    def grids(self, table: RoundTable) -> CompletionGrids:
        """What is left, and where."""
        left = table.completes * Left.CHUNK
        chunk = table.chunk.copy()
        if LayerSums.name not in table.transfers:
            return CompletionGrids(left, chunk)
        for device, chunks in enumerate(summed_behind_layers(table)):
            taken = [summed.before for summed in chunks]
            for summed in chunks:
                left[summed.rounds[0], device] = Left.NOTHING
                # The first layer of a chunk is the last one of a backward; actions of the next chunk sum it, or nobody.
                if summed.chunk not in taken:
                    left[summed.rounds[-1], device] = Left.LAYER
                    chunk[summed.rounds[-1], device] = summed.chunk
        return CompletionGrids(left, chunk)


SUMS_OVER_DATA = SumsOverData()
