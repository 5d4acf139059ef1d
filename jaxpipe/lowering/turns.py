"""Turns: how the program takes types of rounds one after the other, without asking any device what comes next.

On a GPU a loop whose length is known when the program is compiled runs without the host; before every other turn of a
loop, and before a choice, the host waits for the device. So rounds are cut into stretches, whose types no other has.
Each is a loop over turns, of a known number. A turn takes the places of a stretch in order: mostly a place is one type,
of which every turn has one round, and that runs as it is. Else the place is a loop over rounds of its types.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable


@dataclass(frozen=True)
class Turns:
    """A stretch of rounds as turns of equal places.

    Attributes:
        places: [place] types of its rounds, of which only those of messages alone share one.
        taken: [turn][place] rounds that the turn takes there.
    """

    places: tuple[tuple[int, ...], ...]
    taken: tuple[tuple[int, ...], ...]

    def is_certain(self, place: int) -> bool:
        """Whether every turn takes one round at the place."""
        return all(row[place] == 1 for row in self.taken)


def period_of(round_type: np.ndarray) -> int:
    """The longest number of rounds after which all types can return; of types that never return, all rounds.

    Example:
        >>> period_of(np.array([0, 1, 0, 1, 0, 2])), period_of(np.array([0, 1, 2]))
        (2, 3)
    """
    return math.gcd(*(step for index in set(round_type.tolist()) for step in _steps(round_type, index))) or len(
        round_type
    )


def _steps(round_type: np.ndarray, index: int) -> list[int]:
    return np.diff(np.flatnonzero(round_type == index)).tolist()


def turns_of(round_type: np.ndarray, light: Collection[int]) -> list[Turns]:
    """The stretches of rounds of these types, one after the other.

    Args:
        light: types of rounds of messages alone, which are many and small where rounds have no period: they share a
            place, if else some round is not certain.

    Example:
        >>> [stretch.places for stretch in turns_of(np.array([0, 1, 0, 1, 2, 3]), ())]
        [((0,), (1,)), ((2,),), ((3,),)]
        >>> turns_of(np.array([0, 1, 0, 3, 0, 2, 0, 1]), light=(1, 2))
        [Turns(places=((0,), (3,), (1, 2)), taken=((1, 0, 1), (1, 1, 0), (1, 0, 1), (1, 0, 1)))]
    """
    last = np.zeros(round_type.max() + 1, int)
    last[round_type] = np.arange(len(round_type))
    # A stretch ends where no type returns that has been there.
    ends = np.flatnonzero(np.maximum.accumulate(last[round_type]) == np.arange(len(round_type))) + 1
    stretches = []
    for rounds in np.split(round_type, ends[:-1]):
        types = np.unique(rounds).tolist()
        # Every turn has one round of each type, in the same order.
        if not len(rounds) % len(types) and (rounds.reshape(-1, len(types)) == rounds[: len(types)]).all():
            places = tuple((index,) for index in rounds[: len(types)].tolist())
            stretches.append(Turns(places, ((1,) * len(types),) * (len(rounds) // len(types))))
            continue
        few = tuple(index for index in types if index in light)
        heavy = tuple((index,) for index in types if index not in light)
        stretches.append(_searched(rounds, heavy + (few,) * bool(few)))
    return stretches


def light_types(table: RoundTable, others: Sequence[str]) -> list[int]:
    """The types of rounds in which no device does anything but send and receive messages; `others` travel, too."""
    return [
        index
        for index in range(table.num_types)
        if not (table.kinds[index] or any(table.is_at_work(name, index) for name in others))
    ]


def _searched(rounds: np.ndarray, places: tuple[tuple[int, ...], ...]) -> Turns:
    place_of = {index: place for place, types in enumerate(places) for index in types}
    taken = []
    place = len(places)
    for index in rounds.tolist():
        # Back to a place before, or at the last one: a new turn.
        if place_of[index] < place:
            taken.append([0] * len(places))
        place = place_of[index]
        taken[-1][place] += 1
    return Turns(places, tuple(map(tuple, taken)))
