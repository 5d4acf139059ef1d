"""When do the two holders of a stage sum their gradients?

In a schedule of two replicas every stage is on a device d and on its partner D-1-d. The holder of replica 0 owns the
stage: its part of the train state is there. The other one sends its gradients to it, layer by layer, once both are
complete, as SYNC actions say; what is sent at the end of a round travels behind the action of the next one. Permutes
belong to body positions, so the rounds in which gradients may travel are a segment of their own, after the last
forward: no repetition before it pays for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.lowering.moves import Moves, in_lanes
from jaxpipe.lowering.segment import Segment
from jaxpipe.schedules.passes.rows import next_multiple
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind, Schedule

if TYPE_CHECKING:
    from jaxpipe.lowering.table import RoundTable


@dataclass(frozen=True, eq=False)
class Exchange:
    """Gradients on their way from the holder of replica 1 to that of replica 0; X layers.

    Attributes:
        moves: when, and between which devices.
        given, received: [X] chunk on the source and on the target.
        layer: [X] of the stage.
    """

    moves: Moves
    given: np.ndarray
    received: np.ndarray
    layer: np.ndarray


@dataclass(frozen=True, eq=False)
class ExchangeGrids:
    """What each device gives and receives, round by round."""

    given: np.ndarray  # [R, D, lane, 2] (chunk, layer) read at the end of the round, to travel in the next
    num_given: np.ndarray  # [R, D] lanes that are used
    received: np.ndarray  # [R, D, lane, 2] (chunk, layer) to which what travelled in the round is added
    num_received: np.ndarray  # [R, D] lanes that are used


def exchange_grids(table: RoundTable) -> ExchangeGrids:
    """The exchange of `table` as the program reads it."""
    exchange, moves = table.exchange, table.exchange.moves
    shape = (table.num_rounds, table.schedule.num_devices)
    given, received = (np.zeros((*shape, table.num_exchange_lanes, 2), np.int32) for _ in range(2))
    num_given, num_received = (np.zeros(shape, np.int32) for _ in range(2))
    given[moves.round - 1, moves.source, moves.lane] = np.stack([exchange.given, exchange.layer], axis=1)
    received[moves.round, moves.target, moves.lane] = np.stack([exchange.received, exchange.layer], axis=1)
    np.add.at(num_given, (moves.round - 1, moves.source), 1)
    np.add.at(num_received, (moves.round, moves.target), 1)
    return ExchangeGrids(given, num_given, received, num_received)


_NONE = np.zeros(0, dtype=int)
NOTHING_EXCHANGED = Exchange(Moves(_NONE, _NONE, _NONE, _NONE), _NONE, _NONE, _NONE)


def with_exchange(table: RoundTable, schedule: Schedule) -> RoundTable:
    """`table` with the exchange that `schedule` asks for, in a segment of its own.

    No more layers travel at once than it takes to hide, on the device that has least time, what can be hidden there.
    The segment begins as late as hides as much on every device, since its permutes carry something in every repetition,
    asked for or not.

    Args:
        table: of the compute actions of `schedule`, without exchange.
        schedule: with SYNC actions; a stage without them is summed at the end of the step.
    """
    if schedule.num_replicas == 1 or not table.has_backward:
        return table
    complete = _complete(table, schedule)
    owed, last = _owed(table, complete), int(table.rounds.max())

    def dealt(tail: _Tail, num_lanes: int) -> list[list[int]]:
        return [_rounds_of(device_owes, num_lanes, tail) for device_owes in owed]

    def exposed(tail: _Tail, num_lanes: int) -> list[int]:
        """[device] layers that travel after the last action."""
        return [sum(r > last for r in rounds) for rounds in dealt(tail, num_lanes)]

    tails, most = _tails(table, first=int(min(complete)) + 1), max(map(len, owed))
    least = max(exposed(tails[0], most))
    num_lanes = next(lanes for lanes in range(1, most + 1) if max(exposed(tails[0], lanes)) == least)
    least = sum(exposed(tails[0], num_lanes))
    tail = next(tail for tail in reversed(tails) if sum(exposed(tail, num_lanes)) == least)
    travels = dealt(tail, num_lanes)

    *before, final = table.segments
    stop = max(max(map(max, travels)), last) + 1
    segments = (
        *before,
        Segment(final.start, tail.start, final.body_rounds),
        Segment(tail.start, tail.start + next_multiple(stop - tail.start, tail.body_rounds), tail.body_rounds),
    )
    return replace(
        table,
        segments=tuple(segment for segment in segments if segment.num_repetitions),
        exchange=_exchange(table.schedule, owed, travels),
    )


@dataclass(frozen=True, eq=False)
class _Tail:
    """A segment in which gradients may travel."""

    start: int
    is_used: np.ndarray  # [position] whether they travel there: where an action hides them, if there is any

    @property
    def body_rounds(self) -> int:
        return len(self.is_used)


def _tails(table: RoundTable, *, first: int) -> list[_Tail]:
    """Tails that begin in round `first` or later, after the last forward; one after all actions if no other can be."""
    final, last = table.segments[-1], int(table.rounds.max())
    last_forward = int(table.rounds[table.schedule.columns.is_kind(Kind.F)].max())
    body_rounds = final.body_rounds
    earliest = final.start + next_multiple(max(first, last_forward + 1) - final.start, body_rounds)
    positions = np.arange(body_rounds)
    tails = [
        _Tail(start, np.isin(positions, (table.rounds[table.rounds >= start] - start) % body_rounds))
        for start in range(earliest, last + 1, body_rounds)
    ]
    return tails or [_Tail(earliest, np.array([True]))]


def _complete(table: RoundTable, schedule: Schedule) -> np.ndarray:
    """[stage] the round at whose end both holders have its gradients and have come to its SYNC."""
    first = table.schedule.columns.first
    last = table.rounds.max()
    complete = np.full((schedule.num_replicas, schedule.num_stages), last)
    for device, row in enumerate(schedule.rows):
        rounds = [-1, *table.rounds[first[device] : first[device + 1]].tolist()]
        num_done = 0
        for action in row:
            if action.kind in COMPUTE_KINDS:
                num_done += 1
            elif action.kind is Kind.SYNC:
                complete[action.replica, action.stage] = rounds[num_done]
    return complete.max(axis=0)


def _owed(table: RoundTable, complete: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """[device] (round in which it is complete, stage, layer) of all gradients that it gives away, in order."""
    placement = table.schedule.placement
    return [
        sorted(
            (int(complete[stage]), stage, layer)
            for replica, stage in held
            if replica == 1
            for layer in range(table.layers_per_stage[stage])
        )
        for held in placement.stages_of
    ]


def _rounds_of(owed: list[tuple[int, int, int]], num_lanes: int, tail: _Tail) -> list[int]:
    """The rounds in which gradients `owed` travel, `num_lanes` at a time; each is read before, in the tail.

    A chunk is complete at the end of a round, summed over the copies of the pipeline in the next one, and then read.
    """
    rounds: list[int] = []
    for r in count(tail.start + 1):
        if len(rounds) == len(owed):
            return rounds
        if tail.is_used[(r - tail.start) % tail.body_rounds]:
            waiting = owed[len(rounds) : len(rounds) + num_lanes]
            rounds += [r for complete, _, _ in waiting if complete + 1 < r]
    raise AssertionError


def _exchange(schedule: Schedule, owed: list[list[tuple[int, int, int]]], dealt: list[list[int]]) -> Exchange:
    placement = schedule.placement
    sent = [
        (r, device, stage, layer)
        for device, (device_owes, rounds) in enumerate(zip(owed, dealt, strict=True))
        for (_, stage, layer), r in zip(device_owes, rounds, strict=True)
    ]
    rounds, source, stages, layers = np.array(sent, dtype=int).T
    target = np.array(placement.devices[0])[stages]
    given = np.array([placement.chunk_of(stage, 1) for stage in stages.tolist()])
    received = np.array([placement.chunk_of(stage, 0) for stage in stages.tolist()])
    return Exchange(in_lanes(rounds, source, target), given, received, layers)
