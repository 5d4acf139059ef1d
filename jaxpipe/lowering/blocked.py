"""Rounds for two devices whose permutes hold both of them up: the shortest step that their rows allow.

Every exchange is a meeting of both devices then. Between two meetings each does the next actions of its row, as far as
the messages that it has allow, and the longer part takes the time. So a step is a path from meeting to meeting, over
pairs of numbers, the actions that each device has done, and the shortest one is found by Dijkstra's algorithm. A
meeting has a round of its own, in which no device computes; in the rounds of actions no device waits.
"""

from __future__ import annotations

from bisect import bisect_right
from heapq import heappop, heappush
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Kind, Schedule

_OF_A_MEETING = 1e-6  # of paths that are equally long, the one with the fewest meetings is taken


class BlockedRounds(NamedTuple):
    """Rounds of two devices."""

    rounds: np.ndarray  # [A] the round of each action
    send_round: np.ndarray  # [A] that of its message, if another device reads it
    is_meeting: np.ndarray  # [R] whether messages travel in a round; in others, actions run


def shortest_rounds(compute: Schedule, costs: Costs) -> BlockedRounds:
    """The rounds of the shortest step at `costs`, without time for messages.

    Args:
        compute: a schedule of compute actions alone, for two devices.
        costs: costs of the actions.

    Example:
        One microbatch: device 0 does its F, both meet, device 1 does F and B, they meet, and device 0 does its B.

        >>> from jaxpipe.schedules import build
        >>> found = shortest_rounds(build("gpipe", num_devices=2, num_microbatches=1), Costs())
        >>> found.rounds.tolist(), found.is_meeting.tolist()  # 0F0 0B0 1F0 1B0
        ([0, 5, 2, 3], [False, True, False, False, True, False])
    """
    rows = tuple(_Row.of(compute, costs, device) for device in range(2))
    end = tuple(len(row.needed) for row in rows)
    before: dict[tuple[int, ...], tuple[int, ...]] = {}  # the meeting before each, on the shortest path to it
    heap = [(0.0, (0, 0), (0, 0))]
    while end not in before:
        now, at, came_from = heappop(heap)
        if at in before:
            continue
        before[at] = came_from
        parts = [row.parts(own, other) for row, own, other in zip(rows, at, at[::-1], strict=True)]
        for (i, first), (j, second) in product(*parts):
            if (i, j) not in before:
                heappush(heap, (now + max(first, second) + _OF_A_MEETING, (i, j), at))

    path = [end]
    while path[-1] != (0, 0):
        path.append(before[path[-1]])
    first = compute.columns.first
    rounds, send_round = np.zeros((2, len(compute.columns.kind)), int)
    is_meeting: list[bool] = []
    for meeting, next_meeting in zip(path[:0:-1], path[-2::-1], strict=True):
        is_meeting += [True] * bool(is_meeting)
        num_rounds = max(last - at for at, last in zip(meeting, next_meeting, strict=True))
        for device, (at, last) in enumerate(zip(meeting, next_meeting, strict=True)):
            part = slice(first[device] + at, first[device] + last)
            rounds[part] = len(is_meeting) + np.arange(last - at)
            send_round[part] = len(is_meeting) + num_rounds
        is_meeting += [False] * num_rounds
    return BlockedRounds(rounds, send_round, np.array(is_meeting))


class _Row(NamedTuple):
    """The row of a device, by positions."""

    time: list[float]  # until each action, if the device never waits; and until the end
    needed: list[int]  # actions of the other device that have to be done before each
    stop: list[int]  # how far a part that begins with each may go: up to an action that overwrites an unsent message

    @classmethod
    def of(cls, compute: Schedule, costs: Costs, device: int) -> _Row:
        columns = compute.columns
        sender, reader = dependencies(compute).messages_between(columns.device)
        needed, is_sent = np.zeros((2, len(columns.kind)), int)
        needed[reader], is_sent[sender] = columns.position[sender] + 1, 1
        own = slice(columns.first[device], columns.first[device + 1])
        kind, is_sent = columns.kind[own], is_sent[own]
        time = costs.of_kind(compute.num_stages)[kind, columns.stage[own]].tolist()
        stop, overwrites = [len(kind)] * (len(kind) + 1), len(kind)
        for at in range(len(kind) - 1, -1, -1):
            stop[at] = overwrites if is_sent[at] else stop[at + 1]
            overwrites = overwrites if kind[at] == Kind.W else at
        return cls([0.0, *accumulate(time)], np.maximum.accumulate(needed[own]).tolist(), stop)

    def parts(self, done: int, other: int) -> list[tuple[int, float]]:
        """Ends of parts of the row after `done` actions, and their times, where the other device has done `other`."""
        last = min(bisect_right(self.needed, other), self.stop[done])
        return [(end, self.time[end] - self.time[done]) for end in range(done, last + 1)]
