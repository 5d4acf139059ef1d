"""Gathers of weights over `data` by devices that keep gathered chunks in a few slots (`jaxpipe.lowering.kept`).

A chunk that no slot has is gathered behind the layers of the device's action before, one layer a turn, into the place
of the layer that the turn has read: the slot may be that of the action itself. The first chunk of a device is gathered
before any action, as is that of `copy_gathers`; a device that begins at once gathers its first layer alone, and each
other one behind the layer before.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    """What each device gathers before any action, into its first slot."""

    chunk: np.ndarray  # [D]
    num_layers: np.ndarray  # [D]


@dataclass(frozen=True)
class KeptGathers(Transfer[RoundTable]):
    """What devices of one index of `pipe` gather; nothing of it travels along `pipe`."""

    num_slots: int

    name = "kept_gathers"

    def hangs(self, table: RoundTable) -> np.ndarray:
        """On each action before one whose chunk is gathered, and on the first one of a device that begins at once."""
        hangs = np.zeros(table.kind.shape, bool)
        for device, order in enumerate(self._orders(table)):
            hangs[order.gathering, device] = True
            if order.begins_at_once:
                hangs[order.rounds[0], device] = True
        return hangs

    def before(self, table: RoundTable) -> KeptBefore:
        """What precedes the actions."""
        chunk, num_layers = np.zeros((2, table.schedule.num_devices), np.int32)
        for device, order in enumerate(self._orders(table)):
            for round_ in order.rounds[:1]:
                chunk[device] = table.chunk[round_, device]
                whole = table.layers_per_stage[table.stage[round_, device]]
                num_layers[device] = 1 if order.begins_at_once else whole
        return KeptBefore(chunk, num_layers)

    def grids(self, table: RoundTable) -> KeptGrids:
        """What each action reads and gathers."""
        num_layers = np.array(table.layers_per_stage)[table.stage]
        slot, into, num_gathered, ahead = (np.zeros_like(table.chunk) for _ in range(4))
        grids = KeptGrids(slot, table.chunk.copy(), into, num_gathered, ahead)
        for device, order in enumerate(self._orders(table)):
            grids.slot[order.rounds, device] = order.slot
            grids.chunk[order.gathering, device] = table.chunk[order.gathered, device]
            grids.into[order.gathering, device] = grids.slot[order.gathered, device]
            grids.num_layers[order.gathering, device] = num_layers[order.gathered, device]
            if order.begins_at_once:
                grids.ahead[order.rounds[0], device] = 1
        return grids

    def _orders(self, table: RoundTable) -> Iterator[_Order]:
        """[D] the actions that read weights."""
        for device, order in enumerate(orders_in_rounds(table, *GATHERING_KINDS)):
            slot, is_gathered = keep(table.chunk[order.place, device].tolist(), self.num_slots)
            yield _Order(order.place, slot, is_gathered, is_first=bool((order.stage[:1] == 0).any()))


@dataclass(frozen=True)
class _Order:
    rounds: np.ndarray  # [A] of a device's actions
    slot: np.ndarray  # [A]
    is_gathered: np.ndarray  # [A]
    is_first: bool  # whether nobody sends the first one its message

    @property
    def gathered(self) -> np.ndarray:
        """Rounds of the actions whose chunk is gathered behind the action before."""
        return self.rounds[1:][self.is_gathered[1:]]

    @property
    def gathering(self) -> np.ndarray:
        """Rounds of the actions before these."""
        return self.rounds[:-1][self.is_gathered[1:]]

    @property
    def begins_at_once(self) -> bool:
        """Whether the first action gathers its own chunk: it gathers no other one."""
        return self.is_first and not self.is_gathered[1:2].any()
