"""Gathers of weights over `data` by devices that keep gathered chunks in a few slots (`jaxpipe.lowering.kept`).

A chunk that no slot has is gathered behind the layers of the device's action before, one layer a turn, into the place
of the layer that the turn has read: the slot may be that of the action itself. The first chunk of a device is gathered
before any action, as is that of `copy_gathers`; a device that begins at once gathers its first layer alone, and each
other one behind the layer before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.kept import keep
from jaxpipe.lowering.spread import orders_in_rounds
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers.weight_gathers import GATHERING_KINDS


@dataclass(frozen=True, eq=False)
class KeptGrids:
    """Where an action finds its weights, and what its turns gather: each the layer with the number of its own."""

    slot: np.ndarray  # [R, D] of its own chunk
    chunk: np.ndarray  # [R, D] that is gathered
    into: np.ndarray  # [R, D] the slot of that chunk
    num_layers: np.ndarray  # [R, D] of that chunk; those beyond the turns follow them, behind nothing
    ahead: np.ndarray  # [R, D] 1: a turn gathers the layer of the next turn, of its own chunk


@dataclass(frozen=True, eq=False)
class KeptBefore:
    """What travels before the first action or after the last one, of a chunk in the first slot."""

    chunk: np.ndarray  # [D]
    num_layers: np.ndarray  # [D]


@dataclass(frozen=True)
class SlotOrder:
    """The actions of a device that read weights, in order; of those that sum gradients, from the last to the first."""

    rounds: np.ndarray  # [A]
    slot: np.ndarray  # [A]
    is_gathered: np.ndarray  # [A]
    is_first: bool  # whether nobody waits for what the first one travels with

    @property
    def gathered(self) -> np.ndarray:
        """Rounds of the actions whose chunk travels behind the action before."""
        return self.rounds[1:][self.is_gathered[1:]]

    @property
    def gathering(self) -> np.ndarray:
        """Rounds of the actions before these."""
        return self.rounds[:-1][self.is_gathered[1:]]

    @property
    def is_alone(self) -> bool:
        """Whether the chunk of the first action travels behind its own layers: no other one does."""
        return self.is_first and not self.is_gathered[1:2].any()

    @property
    def hanging(self) -> np.ndarray:
        """Rounds of the actions behind whose layers a chunk travels."""
        return np.append(self.gathering, self.rounds[:1] if self.is_alone else [])


def slot_grids(table: RoundTable, orders: Sequence[SlotOrder]) -> KeptGrids:
    """What the actions of orders read, and what travels behind them."""
    num_layers = np.array(table.layers_per_stage)[table.stage]
    slot, into, num_gathered, ahead = (np.zeros_like(table.chunk) for _ in range(4))
    grids = KeptGrids(slot, table.chunk.copy(), into, num_gathered, ahead)
    for device, order in enumerate(orders):
        grids.slot[order.rounds, device] = order.slot
        grids.chunk[order.gathering, device] = table.chunk[order.gathered, device]
        grids.into[order.gathering, device] = grids.slot[order.gathered, device]
        grids.num_layers[order.gathering, device] = num_layers[order.gathered, device]
        if order.is_alone:
            grids.into[order.rounds[0], device] = order.slot[0]
            grids.ahead[order.rounds[0], device] = 1
    return grids


def at_the_end(table: RoundTable, orders: Sequence[SlotOrder]) -> KeptBefore:
    """The layers of the first action's chunk that travel behind nothing."""
    chunk, num_layers = np.zeros((2, len(orders)), np.int32)
    for device, order in enumerate(orders):
        for round_ in order.rounds[:1]:
            chunk[device] = table.chunk[round_, device]
            whole = table.layers_per_stage[table.stage[round_, device]]
            num_layers[device] = min(1, whole) if order.is_alone else whole
    return KeptBefore(chunk, num_layers)


def hanging(table: RoundTable, orders: Sequence[SlotOrder]) -> np.ndarray:
    """[R, D] the actions behind whose layers a chunk travels."""
    hangs = np.zeros(table.kind.shape, bool)
    for device, order in enumerate(orders):
        hangs[order.hanging.astype(int), device] = True
    return hangs


@dataclass(frozen=True)
class KeptGathers(Transfer[RoundTable]):
    """What devices of one index of `pipe` gather; nothing of it travels along `pipe`."""

    num_slots: int

    name = "kept_gathers"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On each action before one whose chunk is gathered, and on the first one of a device that begins at once."""
        return hanging(table, self._orders(table))

    def before(self, table: RoundTable) -> KeptBefore:
        """What precedes the actions."""
        return at_the_end(table, self._orders(table))

    def grids(self, table: RoundTable) -> KeptGrids:
        """What each action reads and gathers."""
        return slot_grids(table, self._orders(table))

    def _orders(self, table: RoundTable) -> list[SlotOrder]:
        """[D]."""
        orders = []
        for device, order in enumerate(orders_in_rounds(table, *GATHERING_KINDS)):
            slots = keep(table.chunk[order.place, device].tolist(), self.num_slots)
            orders.append(SlotOrder(order.place, *slots, is_first=bool((order.stage[:1] == 0).any())))
        return orders
