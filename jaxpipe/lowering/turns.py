"""Turns: how the program takes types of rounds one after the other, and asks the device little about what comes next.

On a GPU a loop whose length is known when the program is compiled runs without the host; before every other turn of a
loop, and before a choice, the host waits for the device. So rounds are cut into stretches, whose types no other has.
Each is a loop over turns, of a known number. A turn takes the places of a stretch in order: mostly a place is one type,
of which every turn has one round, and that runs as it is. Of the other places

* rounds of messages alone share one: a choice, if no turn has two of them; else a loop over them;
* types that few turns have share one: a loop over their rounds, and in it a guard for each type;
* each type that is left is a loop over its rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering.table import RoundTable


@dataclass(frozen=True)
class Place:
    """A place in the turns of a stretch.

    Attributes:
        types: the types of its rounds.
        taken: [turn] rounds that the turn takes there.
        is_light: whether in all of them devices only send and receive messages.
    """

    types: tuple[int, ...]
    taken: tuple[int, ...]
    is_light: bool = False

    @property
    def is_certain(self) -> bool:
        """Whether every turn takes one round here, of the only type."""
        return len(self.types) == 1 and set(self.taken) == {1}

    @property
    def is_choice(self) -> bool:
        """Whether a turn chooses here among rounds of messages, and none."""
        return self.is_light and not self.is_certain and max(self.taken) == 1

    @property
    def num_waits(self) -> int:
        """Times that the host waits for the device here, in all turns."""
        if self.is_certain:
            return 0
        num_turns = len(self.taken)
        if self.is_choice:
            return num_turns
        num_rounds = sum(self.taken)
        of_loop = num_turns + num_rounds
        if len(self.types) == 1:
            return of_loop
        # The choice among the permutes of a round; or a guard for each type, of which one is entered.
        return of_loop + num_rounds * (1 if self.is_light else len(self.types) + 1)


Turns = list[Place]  # the places of a stretch


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
        light: types of rounds of messages alone.

    Example:
        >>> [[place.types for place in places] for places in turns_of(np.array([0, 1, 0, 1, 2, 3]), ())]
        [[(0,), (1,)], [(2,)], [(3,)]]
        >>> for place in turns_of(np.array([0, 1, 0, 3, 0, 2, 0, 1]), light=(1, 2))[0]:
        ...     print(place.types, place.taken, place.num_waits)
        (0,) (1, 1, 1, 1) 0
        (3,) (0, 1, 0, 0) 5
        (1, 2) (1, 0, 1, 1) 4
    """
    last = np.zeros(round_type.max() + 1, int)
    last[round_type] = np.arange(len(round_type))
    # A stretch ends where no type returns that has been there.
    ends = np.flatnonzero(np.maximum.accumulate(last[round_type]) == np.arange(len(round_type))) + 1
    return [_stretch(rounds, light) for rounds in np.split(round_type, ends[:-1])]


def _stretch(rounds: np.ndarray, light: Collection[int]) -> Turns:
    types = np.unique(rounds).tolist()
    # Every turn has one round of each type, in the same order.
    if not len(rounds) % len(types) and (rounds.reshape(-1, len(types)) == rounds[: len(types)]).all():
        return [Place((index,), (1,) * (len(rounds) // len(types))) for index in rounds[: len(types)].tolist()]
    few = tuple(index for index in types if index in light)
    heavy = [index for index in types if index not in light]
    often = sorted(heavy, key=lambda index: -(rounds == index).sum())

    def with_rare(num: int) -> Turns:
        rare = sorted(often[len(often) - num :])
        singles = [(index,) for index in heavy if index not in rare]
        return _searched(rounds, [*singles, tuple(rare), few], light)

    # As many types share a place as make the host wait the least.
    return min(map(with_rare, range(len(heavy) + 1)), key=lambda places: sum(place.num_waits for place in places))


def light_types(table: RoundTable, others: Sequence[str]) -> list[int]:
    """The types of rounds in which no device does anything but send and receive messages; `others` travel, too."""
    return [
        index
        for index in range(table.num_types)
        if not (table.kinds[index] or any(table.is_at_work(name, index) for name in others))
    ]


def _searched(rounds: np.ndarray, places: Sequence[tuple[int, ...]], light: Collection[int]) -> Turns:
    """The turns over these places, of which some may have no types."""
    places = [types for types in places if types]
    place_of = {index: place for place, types in enumerate(places) for index in types}
    taken = []
    place = len(places)
    for index in rounds.tolist():
        # Back to a place before, or at the last one: a new turn.
        if place_of[index] < place:
            taken.append([0] * len(places))
        place = place_of[index]
        taken[-1][place] += 1
    columns = zip(*taken, strict=True)
    return [Place(types, column, types[0] in light) for types, column in zip(places, columns, strict=True)]
