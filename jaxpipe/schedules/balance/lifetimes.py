"""How long each device stores what its forwards leave: the rows, counted in compute actions.

Goes in: a schedule. Comes out: for each device, from which compute action of its row to which other one
it keeps a (stage, microbatch). `balance` decides on this what to evict; times come from `memory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from jaxpipe.schedules.action import COMPUTE_KINDS, Action, Kind
from jaxpipe.schedules.schedule import Schedule


class Lifetime(NamedTuple):
    """Storage of one (stage, microbatch), in indices of its row's compute actions."""

    forward: Action
    start: int  # its F
    need: int  # its B or I, which reads it first
    end: int  # its B or W, which gives it back


def lifetimes(schedule: Schedule) -> tuple[tuple[Lifetime, ...], ...]:
    """[device] -> lifetimes in the order of their forwards; `schedule` is legal."""
    return tuple(map(_of_row, schedule.rows))


def num_stored(row: Sequence[Lifetime]) -> list[int]:
    """[compute action] how many (stage, microbatch) the device stores during it."""
    return num_within([(lifetime.start, lifetime.end) for lifetime in row])


def num_within(spans: Sequence[tuple[int, int]]) -> list[int]:
    """[index] how many of `spans`, ends included, it lies in; as long as the last end needs."""
    changes = [0] * (max((last for _, last in spans), default=-1) + 2)
    for first, last in spans:
        changes[first] += 1
        changes[last + 1] -= 1
    return list(accumulate(changes))[:-1]


def _of_row(row: tuple[Action, ...]) -> tuple[Lifetime, ...]:
    start: dict[tuple[int, int], tuple[int, Action]] = {}
    need: dict[tuple[int, int], int] = {}
    end: dict[tuple[int, int], int] = {}
    for index, action in enumerate(action for action in row if action.kind in COMPUTE_KINDS):
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            start[key] = index, action
        else:
            need.setdefault(key, index)
            end[key] = index
    return tuple(Lifetime(action, index, need[key], end[key]) for key, (index, action) in start.items())
