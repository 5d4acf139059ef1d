"""A schedule is a value: for every device, an ordered row of actions.

Built and compared without JAX and without a model. `columns` is the same thing as integer arrays, for
the parts (rules, simulate, lower) that look at all actions at once.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from jaxpipe.schedules.action import MOVE_KINDS, Action, Kind
from jaxpipe.schedules.placement import Placement

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Schedule:
    """Rows of actions on a placement.

    Attributes:
        name: as in the registry, or of the file it was read from.
        placement: who holds which stage.
        num_microbatches: microbatches of one step, over all replicas.
        rows: [device][position] -> Action.
        parked: [stage] -> the share, in (0, 1], of a microbatch's pages that EVICT moves to the paired
            device and LOAD brings back; empty where that is 1 for every stage: whole microbatches.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]
    parked: tuple[Fraction, ...] = ()

    @property
    def num_devices(self) -> int:
        """Devices on the `pipe` axis."""
        return self.placement.num_devices

    @property
    def num_stages(self) -> int:
        """Stages of one replica of the model."""
        return self.placement.num_stages

    @property
    def num_replicas(self) -> int:
        """Full copies of the model's stages."""
        return self.placement.num_replicas

    def parked_of(self, stage: int) -> Fraction:
        """The share of a microbatch's pages of `stage` that EVICT and LOAD move."""
        return self.parked[stage] if self.parked else Fraction(1)

    @property
    def has_transfers(self) -> bool:
        """Whether activations move between paired devices: EVICT and LOAD."""
        return bool(self.columns.is_kind(*MOVE_KINDS).any())

    @property
    def has_halves(self) -> bool:
        """Whether any backward is in two parts, I and W."""
        return bool(self.columns.is_kind(Kind.W).any())

    @cached_property
    def columns(self) -> Columns:
        """All actions as integer arrays, device by device in row order."""
        import numpy as np

        num_actions = sum(map(len, self.rows))
        fields = itertools.chain.from_iterable(itertools.chain.from_iterable(self.rows))
        table = np.fromiter(fields, np.int64, 4 * num_actions).reshape(num_actions, 4)
        lengths = [len(row) for row in self.rows]
        first = np.cumsum([0, *lengths])
        device = np.repeat(np.arange(self.num_devices), lengths)
        return Columns(
            kind=table[:, 0],
            stage=table[:, 1],
            microbatch=table[:, 2],
            replica=table[:, 3],
            device=device,
            position=np.arange(num_actions) - first[device],
            first=first,
        )


@dataclass(frozen=True)
class Columns:
    """The actions of a schedule as integer arrays; A actions, device by device in row order."""

    kind: np.ndarray  # [A] Kind
    stage: np.ndarray  # [A]
    microbatch: np.ndarray  # [A]
    replica: np.ndarray  # [A]
    device: np.ndarray  # [A] the device whose row the action stands in
    position: np.ndarray  # [A] index in that row
    first: np.ndarray  # [D + 1] index of each device's first action; the last entry is A

    def is_kind(self, *kinds: Kind) -> np.ndarray:
        """[A] whether the action is of one of `kinds`."""
        import numpy as np

        return np.isin(self.kind, kinds)
