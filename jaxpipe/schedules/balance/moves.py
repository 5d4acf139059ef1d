"""EVICT and LOAD actions before they stand in a row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from jaxpipe.schedules.action import COMPUTE_KINDS, Action


class Move(NamedTuple):
    """An EVICT or LOAD that travels during one compute action of its row."""

    before: int  # index of that compute action in its row
    action: Action


class Plan(NamedTuple):
    """What one device evicts and loads.

    Attributes:
        moves: where several travel during the same action, in the order in which they do.
        share: of a microbatch's pages that each move carries.
        most_parked: slots that the partner gives at most, transit included.
    """

    moves: tuple[Move, ...]
    share: Fraction
    most_parked: Fraction


def with_moves(row: Sequence[Action], moves: Sequence[Move]) -> tuple[Action, ...]:
    """The row of a device with `moves` in it; those before the same compute action keep their order."""
    at: dict[int, list[Action]] = defaultdict(list)
    for move in moves:
        at[move.before].append(move.action)
    woven: list[Action] = []
    index = 0
    for action in row:
        if action.kind in COMPUTE_KINDS:
            woven += at[index]
            index += 1
        woven.append(action)
    return tuple(woven)
