"""Sums over `data` and other axes: the gradients of a chunk, behind the layers of the action that completes them.

The sum of a layer travels while the next layer of that action computes, that of its last layer while the next such
action of the device begins. Not behind the last B of a device that sends a message: the stage before would wait for
what is longer than the layer. It is summed in the round after, when its message has left, and so is all where nothing
hangs on layers: else each stage would wait at the end of the step for the sums of all before it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Kind, Schedule


class Left(enum.IntEnum):
    """What a round leaves for the next one to sum."""

    NOTHING = 0
    CHUNK = 1  # all layers of the action's chunk
    LAYER = 2  # the last layer of the action, whose others have been summed behind layers


@dataclass(frozen=True, eq=False)
class CompletionGrids:
    """What each device sums in the round after this one."""

    left: np.ndarray  # [R, D] Left


@dataclass(frozen=True)
class SumsOverData(Transfer[RoundTable]):
    """What devices of one index of `pipe` add up; nothing of it travels along `pipe`."""

    behind_layers: bool = False

    name = "sums_over_data"

    def is_asked_for(self, schedule: Schedule) -> bool:
        """Wherever gradients are summed; without flush the updates of layers do it."""
        return not schedule.delays and bool(schedule.columns.is_kind(*BACKWARD_KINDS).any())

    def hangs(self, table: RoundTable) -> np.ndarray | None:
        """On actions that complete a chunk, but for a device's last one if its message would wait."""
        if not self.behind_layers:
            return None
        completes = table.completes == 1
        sends = (table.kind == Kind.B) & (table.stage > 0)
        return completes & ~(sends & _is_last(completes))

    def works_in(self, table: RoundTable) -> np.ndarray:
        """A round sums what the round before has left; what the last round leaves is summed after it."""
        # The first round follows none.
        return np.append(False, table.grids[self.name].left[:-1].any(axis=1))

    def grids(self, table: RoundTable) -> CompletionGrids:
        """What is left, and where."""
        hangs = self.hangs(table)
        if hangs is None:
            return CompletionGrids(table.completes * Left.CHUNK)
        # The last layer waits for the next action that sums. With two replicas gradients travel to the other holder
        # from the second round on, and it does not wait.
        at_once = hangs if table.schedule.num_replicas > 1 else _is_last(hangs)
        left = np.where(hangs, at_once * Left.LAYER, table.completes * Left.CHUNK)
        return CompletionGrids(left)


def _is_last(where: np.ndarray) -> np.ndarray:
    """[R, D] whether it is the last round in which `where` is true on the device."""
    return where & (np.cumsum(where[::-1], axis=0)[::-1] == 1)


SUMS_OVER_DATA = SumsOverData()
SUMS_BEHIND_LAYERS = SumsOverData(behind_layers=True)
