"""Sums of what all stages share, in a run without flush: the rounds in which all devices meet for them.

Embedding and head are on all devices. Without a flush their gradients are complete at different times, and each batch
updates them while the next one is under way: see `jaxpipe.program.channels.shared_sums`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer
from jaxpipe.schedules.schedule import WHOLE_BATCH_KINDS, Schedule


class Meeting(enum.IntEnum):
    """What all devices do together in a round, with the parameters that all stages share: embedding and head.

    The head's gradients of batch w-1 are complete after the last forward of the last stage, those of the embedding
    after the last backward of the first one.
    """

    NONE = 0
    COLLECT_HEAD = 1  # the last stage gives up its gradients of batch w-1, and begins with batch w
    UPDATE_HEAD = 2  # all learn whether they are finite, and update a head whose weights have no delay
    COLLECT_OTHERS = 3  # all other stages give up their gradients of batch w-1
    UPDATE_SHARED = 4  # all learn whether they are finite, and what batch w-1 measured; and update what is left


OF_HEAD = (Meeting.COLLECT_HEAD, Meeting.UPDATE_HEAD)  # between batches w-1 and w of the last stage


def meetings_of(schedule: Schedule) -> tuple[Meeting, ...]:
    """The meetings of a call, in turn."""
    of_head = OF_HEAD[:1] if schedule.delays[-1] else OF_HEAD
    return *of_head, Meeting.COLLECT_OTHERS, Meeting.UPDATE_SHARED


@dataclass(frozen=True, eq=False)
class SumGrids:
    """A device's line of batches and meetings, in a table of several calls."""

    batch_age: (
        np.ndarray
    )  # [R, D] calls since the batch of the action began: 0 for the newest one, 1 for the one before
    event: np.ndarray  # [R, D] the Meeting in a round


@dataclass(frozen=True, eq=False)
class SharedSums(Transfer[RoundTable]):
    """The meetings of all calls."""

    event: np.ndarray  # [R] the Meeting in a round, NONE in most

    name = "shared_sums"

    def payloads(self, table: RoundTable) -> Payloads:
        """Each meeting, as a lane of its own."""
        rounds = np.flatnonzero(self.event)
        none = np.zeros_like(rounds)
        return Payloads(rounds, none, none, self.event[rounds], size=1)

    def event_of_type(self, table: RoundTable) -> tuple[Meeting, ...]:
        """[type] the meeting of its rounds."""
        return tuple(Meeting(self.event[table.round_type == index].max()) for index in range(table.num_types))

    def num_collectives(self, table: RoundTable) -> np.ndarray:
        """[type] 1 where all devices meet."""
        # Collectives of one meeting count as one, whatever number of arrays they sum.
        return np.array([int(event is not Meeting.NONE) for event in self.event_of_type(table)])

    def grids(self, table: RoundTable) -> SumGrids:
        """Batches and meetings, round by round."""
        columns = table.schedule.columns
        is_of_batch = columns.is_kind(*WHOLE_BATCH_KINDS)  # its microbatch is the number of its batch
        batch = np.where(is_of_batch, columns.microbatch, columns.microbatch // table.schedule.batch_size)
        batch_age = table.grid(table.rounds // table.rounds_per_call - batch, otherwise=0)
        return SumGrids(batch_age, np.broadcast_to(self.event[:, None], batch_age.shape))
