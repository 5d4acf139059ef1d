"""Cells: which action each device does in each round, as grids of integers [round, device]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.lowering.chunks import chunk_of_action, completes_chunk
from jaxpipe.lowering.pairs import kinds_in_rounds, of_pairs
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies
from jaxpipe.schedules.schedule import BACKWARD_KINDS, WHOLE_BATCH_KINDS, Kind, Schedule

# The kind of a device that does nothing in a round. No guard of an action equals it (`program.actions.run`), the replay
# gives it no time, and pictures leave it blank. As the chunk that `channels.sums_over_data` carries it says that there
# is none.
IDLE = -1


@dataclass(frozen=True, eq=False)
class Cells:
    """A schedule whose actions have rounds; fields and axes as in `jaxpipe.lowering.table.RoundTable`."""

    schedule: Schedule
    layers_per_stage: tuple[int, ...]
    rounds: np.ndarray
    send_round: np.ndarray
    round_type: np.ndarray

    @property
    def num_rounds(self) -> int:
        """Rounds of a step, R."""
        return len(self.round_type)

    @cached_property
    def num_types(self) -> int:
        """Types of rounds."""
        return int(self.round_type.max()) + 1

    @cached_property
    def rounds_of_type(self) -> np.ndarray:
        """[type] number of rounds."""
        return np.bincount(self.round_type)

    @cached_property
    def dependencies(self) -> Dependencies:
        """The actions whose message and whose residuals each action reads."""
        return dependencies(self.schedule)

    def grid(self, values: np.ndarray | int, *, otherwise: int) -> np.ndarray:
        """[R, D] `values` of the actions at their round and device, `otherwise` if a device idles."""
        cells = np.full((self.num_rounds, self.schedule.num_devices), otherwise, np.int32)
        cells[self.rounds, self.schedule.columns.device] = values
        return cells

    @cached_property
    def kind(self) -> np.ndarray:
        """[R, D] Kind, or IDLE; of a pair TAKE, PAIR and PUT."""
        return self.grid(kinds_in_rounds(self.schedule), otherwise=IDLE)

    def durations(self, costs: Costs) -> np.ndarray:
        """[R, D] the time of each action, and 0 where a device idles."""
        times = np.zeros(self.kind.shape)
        columns = self.schedule.columns
        of_action = costs.of_kind(self.schedule.num_stages)[columns.kind, columns.stage]
        times[self.rounds, columns.device] = of_pairs(self.schedule, of_action, costs.pair)
        return times

    @cached_property
    def stage(self) -> np.ndarray:
        """[R, D] stage of the action; 0 where idle."""
        return self.grid(self.schedule.columns.stage, otherwise=0)

    @cached_property
    def microbatch(self) -> np.ndarray:
        """[R, D] microbatch of the action, counted in its batch; 0 where idle, and for an action of a whole batch."""
        columns = self.schedule.columns
        size = self.schedule.batch_size
        return self.grid(np.where(columns.is_kind(*WHOLE_BATCH_KINDS), 0, columns.microbatch % size), otherwise=0)

    @cached_property
    def chunk(self) -> np.ndarray:
        """[R, D] chunk of the action; 0 where idle."""
        return self.grid(chunk_of_action(self.schedule), otherwise=0)

    @cached_property
    def completes(self) -> np.ndarray:
        """[R, D] 1 if the action is the last to add to the gradients of its chunk."""
        return self.grid(completes_chunk(self.schedule, self.rounds), otherwise=0)

    @cached_property
    def kinds(self) -> tuple[frozenset[Kind], ...]:
        """[type] the kinds of action that any device does in any round of the type."""
        return tuple(
            frozenset(Kind(kind) for kind in np.unique(self.kind[self.round_type == index]).tolist() if kind != IDLE)
            for index in range(self.num_types)
        )

    def stages_of(self, round_type: int, kind: Kind, where: np.ndarray | bool = True) -> frozenset[int]:
        """The stages for which any device does an action of `kind` in rounds of the type, in cells of `where`."""
        here = (self.kind == kind) & (self.round_type == round_type)[:, None] & where
        return frozenset(self.stage[here].tolist())

    @cached_property
    def has_backward(self) -> bool:
        """Whether the table has any backward; a forward-only table keeps no residuals."""
        return bool(self.schedule.columns.is_kind(*BACKWARD_KINDS).any())
