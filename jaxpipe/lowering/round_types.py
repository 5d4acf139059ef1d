"""Types of rounds: which rounds share a loop body of the program, and with it permutes and traced actions.

The fewer types, the smaller the program; the more, the fewer permutes carry nothing. A fold gives every round a
position in a repeated body, whose permutes are the union over all repetitions. `refine` splits the rounds of a position
by the pairs that they really need, as far as the size of the program allows. A type has a subset of the pairs of its
position, so no device waits longer than before, and fill, steady state and drain need no bodies of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain, count
from operator import or_

import numpy as np

from jaxpipe.lowering.table import RoundTable

MAX_TYPES = 24  # each is a loop of the program, or a branch of one
MAX_TRACED_ACTIONS = 16  # kinds of action in all types together; program size and compile time grow with it
SMALL_WASTE = 0.15  # transfers without content, in messages and as a fraction of these, that a smaller program is worth
MAX_COMPARED = 160  # types of a position that are compared with each other; the rarest others become one


@dataclass(frozen=True)
class RoundType:
    """Rounds that may share a loop body."""

    pairs: int  # bit mask of the transfers that any round needs, as many bits each as messages of its size
    kinds: int  # bit mask of the kinds of action that any device does
    num_rounds: int
    members: tuple[tuple[int, int], ...]  # (position, pairs) of its rounds

    @cached_property
    def size(self) -> int:
        """Its transfers, in messages."""
        return self.pairs.bit_count()

    def waste(self, other: RoundType) -> int:
        """Transfers without content, in messages, that a step makes more if both are one type.

        Example:
            Three rounds that use one link and two that use two: one type sends in vain in the three.

            >>> RoundType(0b01, 0, 3, ()).waste(RoundType(0b11, 0, 2, ()))
            3
        """
        either = (self.pairs | other.pairs).bit_count()
        return (either - self.size) * self.num_rounds + (either - other.size) * other.num_rounds

    def __or__(self, other: RoundType) -> RoundType:
        return RoundType(
            self.pairs | other.pairs,
            self.kinds | other.kinds,
            self.num_rounds + other.num_rounds,
            self.members + other.members,
        )


def refine(
    table: RoundTable, *, max_types: int = MAX_TYPES, max_traced_actions: int = MAX_TRACED_ACTIONS
) -> RoundTable:
    """The table with rounds of one type divided by the transfers that they need, as far as the limits allow.

    Example:
        GPipe in rounds of one type sends both ways in each of them. Refined, forwards and backwards are apart, and so
        are rounds in which some devices have nothing to send.

        >>> from jaxpipe.lowering.lower import Folding
        >>> from jaxpipe.lowering.rounds import earliest_rounds
        >>> from jaxpipe.schedules import build
        >>> schedule = build("gpipe", num_devices=3, num_microbatches=4)
        >>> table = Folding(schedule, (1, 1, 1)).fold(earliest_rounds(schedule), num_positions=1)
        >>> table.sent_messages.tolist(), refine(table).sent_messages.tolist()
        ([16, 32, 16], [4, 10, 4])
    """
    pairs, num_messages = _needed_pairs(table)
    kinds = np.zeros(table.num_rounds, dtype=int)
    # Bits, since several devices do different kinds in one round.
    np.bitwise_or.at(kinds, table.rounds, 1 << table.schedule.columns.kind)
    cells = list(zip(table.round_type.tolist(), pairs, strict=True))
    kinds_of: dict[tuple[int, int], int] = {}
    for cell, own in zip(cells, kinds.tolist(), strict=True):
        kinds_of[cell] = kinds_of.get(cell, 0) | own
    positions: list[list[RoundType]] = [[] for _ in range(table.num_types)]
    for cell, num_rounds in Counter(cells).most_common():
        positions[cell[0]].append(RoundType(cell[1], kinds_of[cell], num_rounds, (cell,)))
    types = _merged(
        [_few(of_position) for of_position in positions],
        max_types=max(max_types, table.num_types),
        max_traced_actions=max(max_traced_actions, table.num_traced_actions),
        allowed=SMALL_WASTE * num_messages,
    )
    type_of = {cell: index for index, round_type in enumerate(types) for cell in round_type.members}
    return replace(table, round_type=_in_turn(np.array([type_of[cell] for cell in cells])))


def _needed_pairs(table: RoundTable) -> tuple[list[int], int]:
    """[R] bit mask of the transfers of each round, and how many are of the size of a message.

    Each transfer has a bit for every pair of each of its lanes, and as many bits as messages of its size.
    """
    payloads = [transfer.payloads(table) for transfer in table.kinds_of_traffic]
    number = np.repeat(np.arange(len(payloads)), [len(sent.round) for sent in payloads])
    lane, source, target, rounds = (
        np.concatenate([getattr(sent, name) for sent in payloads]) for name in ("lane", "source", "target", "round")
    )
    # One integer for each, which sorts faster than four.
    shape = (len(payloads), lane.max(initial=0) + 1, source.max(initial=0) + 1, target.max(initial=0) + 1)
    keys, pair = np.unique(np.ravel_multi_index((number, lane, source, target), shape), return_inverse=True)
    number, *_ = np.unravel_index(keys, shape)
    # So many bits has each pair: a page counts as several messages.
    size = np.array([sent.size for sent in payloads])[number]
    stop = size.cumsum()
    bits = [(1 << end) - (1 << begin) for begin, end in zip((stop - size).tolist(), stop.tolist(), strict=True)]
    masks = [0] * table.num_rounds
    for round_, index in zip(rounds.tolist(), pair.tolist(), strict=True):
        masks[round_] |= bits[index]
    return masks, int((size[pair] == 1).sum())


_Offer = tuple[float, int, int, dict[int, RoundType]]  # waste for what merging saves; two numbers, among these types


def _few(types: list[RoundType]) -> list[RoundType]:
    """At most `MAX_COMPARED` of `types`, which are sorted by their number of rounds: the last ones become one."""
    few = types[: MAX_COMPARED - 1]
    rest = types[MAX_COMPARED - 1 :]
    return [*few, reduce(or_, rest)] if rest else few


class _Position:
    """The types of a position in the order of their numbers, and what merging any two wastes for what it saves."""

    def __init__(self, numbers: list[int], types: list[RoundType], saves: Callable[..., np.ndarray]):
        self.numbers = numbers
        self.types = types
        self.saves = saves
        size = max(round_type.pairs.bit_length() for round_type in types) // 8 + 1
        packed = b"".join(round_type.pairs.to_bytes(size) for round_type in types)
        self.bits = np.unpackbits(np.frombuffer(packed, np.uint8).reshape(-1, size), axis=1)
        self.kinds = np.array([round_type.kinds for round_type in types])
        self.num_rounds = np.array([round_type.num_rounds for round_type in types])
        # [type, later type]
        self.ratios = np.full((len(types),) * 2, np.inf)
        for index in range(1, len(types)):
            self.ratios[:index, index] = self.ratios_of(index)

    def ratios_of(self, index: int) -> np.ndarray:
        """[index] waste over what is saved, of the type `index` with each one before it; infinite if nothing is."""
        bits = self.bits[: index + 1]
        num_rounds = self.num_rounds[: index + 1]
        size = bits.sum(axis=1, dtype=int)
        either = (bits | bits[-1]).sum(axis=1, dtype=int)
        waste = (either - size) * num_rounds + (either - size[-1]) * num_rounds[-1]
        saved = self.saves(self.kinds[:index], self.kinds[index])
        return np.where(saved > 0, waste[:-1] / np.maximum(saved, 1), np.inf)

    def least(self) -> tuple[float, int, int]:
        """The least ratio and, of equal ones, the least numbers of the two types."""
        # The first of equal ones: rows and columns are in the order of numbers.
        first, second = np.unravel_index(self.ratios.argmin(), self.ratios.shape)
        return float(self.ratios[first, second]), self.numbers[first], self.numbers[second]

    def merge(self, pair: list[int], number: int) -> None:
        """Puts one type, the last, in the place of two."""
        new = self.types[pair[0]] | self.types[pair[1]]
        self.types = [old for index, old in enumerate(self.types) if index not in pair] + [new]
        self.numbers = [old for index, old in enumerate(self.numbers) if index not in pair] + [number]
        bits = self.bits[pair[0]] | self.bits[pair[1]]
        self.bits = np.append(np.delete(self.bits, pair, axis=0), [bits], axis=0)
        self.kinds = np.append(np.delete(self.kinds, pair), new.kinds)
        self.num_rounds = np.append(np.delete(self.num_rounds, pair), new.num_rounds)
        left = np.delete(np.delete(self.ratios, pair, axis=0), pair, axis=1)
        self.ratios = np.pad(left, (0, 1), constant_values=np.inf)
        self.ratios[:-1, -1] = self.ratios_of(len(self.types) - 1)


def _merged(
    positions: list[list[RoundType]], *, max_types: int, max_traced_actions: int, allowed: float
) -> list[RoundType]:
    """Types of the same position merged, those with the least waste first, until the program is small enough.

    Types are merged further as long as the waste of all, in messages, is `allowed`.
    """
    numbers = count()
    left = [([next(numbers) for _ in of_position], of_position) for of_position in positions if of_position]
    waste = 0

    def merge(saves: Callable[..., np.ndarray], *, num_in_excess: int) -> None:
        """Merges two types again and again, those with the least waste for what it saves."""
        nonlocal waste
        of_position = [_Position(*types, saves) for types in left]
        least = [position.least() for position in of_position]
        while (best := min(least))[0] < np.inf:
            where = least.index(best)
            position = of_position[where]
            pair = [position.numbers.index(number) for number in best[1:]]
            first, second = (position.types[index] for index in pair)
            added = first.waste(second)
            if num_in_excess <= 0 and waste + added > allowed:
                break
            waste = waste + added
            num_in_excess = num_in_excess - int(saves(first.kinds, second.kinds))
            position.merge(pair, next(numbers))
            least[where] = position.least()
        left[:] = [(position.numbers, position.types) for position in of_position]

    num_traced = sum(round_type.kinds.bit_count() for round_type in chain.from_iterable(positions))
    merge(lambda a, b: np.bitwise_count(a & b), num_in_excess=num_traced - max_traced_actions)
    merge(lambda a, b: np.ones_like(a), num_in_excess=sum(len(types) for _, types in left) - max_types)
    of_number = {number: round_type for types in left for number, round_type in zip(*types, strict=True)}
    return [of_number[number] for number in sorted(of_number)]


def apart_where_hung(table: RoundTable) -> RoundTable:
    """The table with rounds in which something hangs on loops over layers in types of their own.

    Each variant of an action has a guard in every round of its type: apart, other rounds have none for what hangs. Not
    where the program would grow to more than twice as many actions.
    """
    cells = np.stack([table.round_type, np.bitwise_or.reduce(table.hanging, axis=1)])
    _, round_type = np.unique(cells, axis=1, return_inverse=True)
    apart = replace(table, round_type=_in_turn(round_type.ravel()))
    return apart if apart.num_traced_actions <= 2 * sum(map(len, table.kinds)) else table


def _in_turn(types: np.ndarray) -> np.ndarray:
    """[R] `types` numbered in the order in which they usually follow each other, since the program takes them in turn.

    Example:
        >>> _in_turn(np.array([2, 0, 1, 2, 0, 1])).tolist()
        [0, 1, 2, 0, 1, 2]
    """
    follows = Counter(zip(types[:-1].tolist(), types[1:].tolist(), strict=True))
    left = set(types.tolist())
    order = [int(types[0])]
    left.remove(order[0])
    while left:
        order.append(max(left, key=lambda index: (follows[order[-1], index], -index)))
        left.remove(order[-1])
    number = np.empty(len(order), dtype=int)
    number[order] = np.arange(len(order))
    return number[types]
