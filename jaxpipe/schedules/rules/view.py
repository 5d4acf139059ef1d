"""What every rule looks at: the actions that stand where they may, counted and indexed.

Actions are named by their index in `schedule.columns`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.schedules.action import NO_MICROBATCH, Action, Kind
from jaxpipe.schedules.schedule import Columns, Schedule


@dataclass(frozen=True)
class View:
    """What the rules look at; actions are named by their index in `columns`."""

    schedule: Schedule

    @cached_property
    def columns(self) -> Columns:
        """All actions as integer arrays."""
        return self.schedule.columns

    @cached_property
    def in_range(self) -> np.ndarray:
        """[A] whether the schedule has such a stage, replica and microbatch."""
        columns, schedule = self.columns, self.schedule
        microbatch = columns.microbatch
        is_sync = columns.kind == Kind.SYNC
        return (
            (columns.stage >= 0)
            & (columns.stage < schedule.num_stages)
            & (columns.replica >= 0)
            & (columns.replica < schedule.num_replicas)
            & np.where(
                is_sync, microbatch == NO_MICROBATCH, (microbatch >= 0) & (microbatch < schedule.num_microbatches)
            )
        )

    @cached_property
    def held(self) -> np.ndarray:
        """[A] whether it is in range and stands in the row of its stage's holder."""
        columns, held = self.columns, self.in_range.copy()
        devices = np.array(self.schedule.placement.devices)
        held[held] = devices[columns.replica[held], columns.stage[held]] == columns.device[held]
        return held

    @cached_property
    def count(self) -> dict[Kind, np.ndarray]:
        """Kind -> [S, N] how many of the actions that are `held`."""
        size = self._shape[0] * self._shape[1]
        return {kind: np.bincount(keys, minlength=size).reshape(self._shape) for kind, (_, keys) in self._keys.items()}

    @cached_property
    def index(self) -> dict[Kind, np.ndarray]:
        """Kind -> [S, N] the last of the actions that are `held`, or -1."""
        tables = {}
        for kind, (actions, keys) in self._keys.items():
            table = np.full(self._shape[0] * self._shape[1], -1)
            table[keys] = actions
            tables[kind] = table.reshape(self._shape)
        return tables

    @property
    def _shape(self) -> tuple[int, int]:
        return self.schedule.num_stages, self.schedule.num_microbatches

    @cached_property
    def _keys(self) -> dict[Kind, tuple[np.ndarray, np.ndarray]]:
        """Kind -> the actions that are `held`, and the flat [S, N] index of each."""
        keys = {}
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
            actions = np.flatnonzero(self.held & (self.columns.kind == kind))
            keys[kind] = (
                actions,
                self.columns.stage[actions] * self._shape[1] + self.columns.microbatch[actions],
            )
        return keys

    def place(self, index: int) -> tuple[int, int]:
        """Device and position."""
        return int(self.columns.device[index]), int(self.columns.position[index])

    def action(self, index: int) -> Action:
        """The action itself."""
        device, position = self.place(index)
        return self.schedule.rows[device][position]

    def where(self, index: int) -> str:
        """Device and position in words."""
        device, position = self.place(index)
        return f"device {device}, position {position}"
