"""Gradients of layers that a device sums itself until their chunk leaves its slot, and over `data` then.

From the end to the beginning sums are gathers (`kept_gathers`): a chunk that leaves its slot is summed behind the
layers of the device's next such action, one a turn, before that action adds its own in the same place. What the last
action adds is summed behind nothing, or behind its own layers if nobody waits for its message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.kept import keep
from jaxpipe.lowering.spread import SUMMING_KINDS, orders_in_rounds
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers.kept_gathers import KeptBefore, KeptGrids, SlotOrder, at_the_end, hanging, slot_grids
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True, eq=False)
class SlotGrids:
    """Where an action adds its gradients."""

    slot: np.ndarray  # [R, D]


@dataclass(frozen=True)
class KeptSums(Transfer[RoundTable]):
    """The slots; nothing travels."""

    num_slots: int

    name = "kept_sums"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On all actions that make gradients of matrices, but those behind which a chunk leaves."""
        return np.isin(table.kind, SUMMING_KINDS) & ~hanging(table, _orders(table, self.num_slots))

    def grids(self, table: RoundTable) -> SlotGrids:
        """The slot of each action."""
        return SlotGrids(slot_grids(table, _orders(table, self.num_slots)).slot)


@dataclass(frozen=True)
class LeavingSums(Transfer[RoundTable]):
    """What devices of one index of `pipe` add up; nothing of it travels along `pipe`."""

    num_slots: int

    name = "leaving_sums"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On each action after one whose chunk leaves, and on the last one of a device if nobody waits for it."""
        return hanging(table, _orders(table, self.num_slots))

    def after(self, table: RoundTable) -> KeptBefore:
        """What follows the actions."""
        return at_the_end(table, _orders(table, self.num_slots))

    def grids(self, table: RoundTable) -> KeptGrids:
        """What travels behind each action; `into` is the slot that it comes from."""
        return slot_grids(table, _orders(table, self.num_slots))


def _orders(table: RoundTable, num_slots: int) -> list[SlotOrder]:
    """[D] from the last action to the first."""
    orders = []
    for device, order in enumerate(orders_in_rounds(table, *SUMMING_KINDS)):
        rounds = order.place[::-1]
        slots = keep(table.chunk[rounds, device].tolist(), num_slots)
        last = rounds[:1]
        sends_nothing = (table.stage[last, device] == 0) | (table.kind[last, device] == Kind.W)
        orders.append(SlotOrder(rounds, *slots, is_first=bool(sends_nothing.any())))
    return orders
