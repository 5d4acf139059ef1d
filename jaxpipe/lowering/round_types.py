"""Types of rounds: which rounds share a loop body of the program, and with it permutes and traced actions.

A fold gives every round a position in a repeated body, a turn, whose permutes are the union over all turns. `refine`
cuts the turns into stretches, as fill, steady state and drain, each with types of its own: a stretch is one loop whose
length is known, and no device has to be asked what comes next (`jaxpipe.lowering.turns`). The fewer stretches, the
smaller the program; the more, the fewer permutes carry nothing. A type has a subset of the pairs of its position, so no
device waits longer than before.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.turns import period_of

MAX_TYPES = 24  # each is a loop body of the program
MAX_TRACED_ACTIONS = 16  # kinds of action in all types together; program size and compile time grow with it
SMALL_WASTE = 0.03  # transfers without content, as a fraction of messages, that one body less to trace is worth


class RoundType(NamedTuple):  # not a dataclass: tens of thousands are made of a long schedule
    """Rounds that may share a loop body."""

    pairs: int  # bit mask of the transfers that any round needs, as many bits each as messages of its size
    kinds: int  # bit mask of the kinds of action that any device does
    num_rounds: int

    def waste(self, other: RoundType) -> int:
        """Transfers without content, in messages, that a step makes more if both are one type.

        Example:
            Three rounds that use one link and two that use two: one type sends in vain in the three.

            >>> RoundType(0b01, 0, 3).waste(RoundType(0b11, 0, 2))
            3
        """
        pairs, _, num_rounds = self
        pairs_of_other, _, num_of_other = other
        if pairs == pairs_of_other:
            return 0
        either = (pairs | pairs_of_other).bit_count()
        return (either - pairs.bit_count()) * num_rounds + (either - pairs_of_other.bit_count()) * num_of_other

    def __or__(self, other: RoundType) -> RoundType:
        return RoundType(self.pairs | other.pairs, self.kinds | other.kinds, self.num_rounds + other.num_rounds)


Stretch = dict[int, RoundType]  # type in the folded table -> that of a stretch of turns


def refine(
    table: RoundTable, *, max_types: int = MAX_TYPES, max_traced_actions: int = MAX_TRACED_ACTIONS
) -> RoundTable:
    """The table whose turns are cut into stretches with types of their own, as far as the limits allow.

    Example:
        GPipe in rounds of one type sends both ways in each of them. Refined, forwards and backwards are apart, and so
        are rounds in which some devices have nothing to send.

        >>> from jaxpipe.lowering.lower import Folding
        >>> from jaxpipe.lowering.rounds import earliest_rounds
        >>> from jaxpipe.schedules import build
        >>> schedule = build("gpipe", num_devices=3, num_microbatches=4)
        >>> table = Folding(schedule, (1, 1, 1)).fold(earliest_rounds(schedule), num_positions=1)
        >>> table.sent_messages.tolist(), refine(table).sent_messages.tolist()
        ([16, 32, 16], [4, 8, 4])
    """
    pairs, num_messages = _needed_pairs(table)
    columns = table.schedule.columns
    kinds = np.zeros(table.num_rounds, dtype=int)
    # Bits, since several devices do different kinds in one round. What hangs on layers changes no rounds.
    np.bitwise_or.at(kinds, table.rounds, 1 << columns.kind)
    period = period_of(table.round_type)
    # Turns are counted from the last one, which is whole. What is before the first whole one cannot be in its loop.
    first = table.num_rounds % period
    turn = (np.arange(table.num_rounds) - first) // period
    turns: list[Stretch] = [{} for _ in range(int(turn[0]), int(turn[-1]) + 1)]
    cells = list(zip((turn - turn[0]).tolist(), table.round_type.tolist(), strict=True))
    for (index, position), pair, kind in zip(cells, pairs, kinds.tolist(), strict=True):
        round_type = RoundType(pair, kind, 1)
        turns[index][position] = turns[index][position] | round_type if position in turns[index] else round_type
    num_apart = int(first > 0)
    stop = _stretches(
        turns,
        num_apart=num_apart,
        max_types=max(max_types, table.num_types),
        max_traced_actions=max(max_traced_actions, table.num_traced_actions),
        allowed=SMALL_WASTE * num_messages,
    )
    of_turn = np.searchsorted(stop, np.arange(len(turns)), side="right")
    # In the order of time: a stretch has types of its own.
    number: dict[tuple[int, int], int] = {}
    types = [number.setdefault((int(of_turn[index]), position), len(number)) for index, position in cells]
    return replace(table, round_type=np.array(types))


def by_pairs(table: RoundTable) -> RoundTable:
    """The table in which rounds of a type without actions have types of their own if they need other pairs.

    For tables whose rounds follow no turn, as those of links that block. Rounds with actions are divided into those
    that need pairs and those that need none.
    """
    pairs, _ = _needed_pairs(table)
    number: dict[tuple[int, int], int] = {}
    cells = [
        (index, bool(pair) if table.kinds[index] else pair)
        for index, pair in zip(table.round_type.tolist(), pairs, strict=True)
    ]
    return replace(table, round_type=np.array([number.setdefault(cell, len(number)) for cell in cells]))


def _stretches(
    turns: list[Stretch], *, num_apart: int, max_types: int, max_traced_actions: int, allowed: float
) -> list[int]:
    """[stretch] the turn behind its last one: neighbours are merged, those with the least waste first.

    They are merged until the program is small enough, and further as long as the waste, in messages, is `allowed` for
    each action and each round that is traced once in place of twice. The first `num_apart` turns are in no stretch with
    others.
    """
    stretches = turns[:num_apart]
    stop = list(range(1, num_apart + 1))
    # Turns that need the same: nearly all, so that few are left to compare.
    for index, turn in enumerate(turns[num_apart:], num_apart):
        if len(stretches) > num_apart and _kinds(stretches[-1]) == _kinds(turn) and not _is_wasted(stretches[-1], turn):
            stretches[-1] = _joined(stretches[-1], turn)
            stop[-1] = index + 1
        else:
            stretches.append(turn)
            stop.append(index + 1)
    num_traced = sum(round_type.kinds.bit_count() for stretch in stretches for round_type in stretch.values())
    num_types = sum(map(len, stretches))
    # [stretch] what merging it with the next one wastes and saves; the first ones are merged with none.
    offers = [_offer(stretches, index) for index in range(num_apart, len(stretches) - 1)]
    # Beside the offers, so that the least of hundreds is found without a call for each of them.
    ratios = [offer.ratio for offer in offers]
    while offers:
        place = ratios.index(min(ratios))
        offer = offers[place]
        is_small = num_traced <= max_traced_actions and num_types <= max_types
        if ratios[place] > (allowed if is_small else sys.float_info.max):
            break
        num_traced -= offer.num_actions
        num_types -= offer.num_types
        index = num_apart + place
        stretches[index : index + 2] = [_joined(stretches[index], stretches[index + 1])]
        del stop[index]
        # The stretches before and behind have another neighbour.
        before = max(place - 1, 0)
        changed = [_offer(stretches, num_apart + other) for other in range(before, min(place + 1, len(offers) - 1))]
        offers[before : place + 2] = changed
        ratios[before : place + 2] = [offer.ratio for offer in changed]
    return stop


class _Offer(NamedTuple):
    """What merging two stretches wastes, in messages, and what is traced once in place of twice."""

    waste: int
    num_actions: int
    num_types: int

    @property
    def ratio(self) -> float:
        """Waste for what is saved; infinite if nothing is."""
        return self.waste / (self.num_actions + self.num_types) if self.num_types else math.inf


def _offer(stretches: list[Stretch], index: int) -> _Offer:
    earlier, later = stretches[index : index + 2]
    waste = num_actions = num_types = 0
    # One loop: a schedule of many microbatches makes tens of thousands of offers.
    for position, round_type in earlier.items():
        if position in later:
            other = later[position]
            waste += round_type.waste(other)
            num_actions += (round_type.kinds & other.kinds).bit_count()
            num_types += 1
    return _Offer(waste, num_actions, num_types)


def _joined(earlier: Stretch, later: Stretch) -> Stretch:
    joined = earlier | later
    for position, round_type in earlier.items():
        if position in later:
            joined[position] = round_type | later[position]
    return joined


def _is_wasted(earlier: Stretch, later: Stretch) -> bool:
    return any(round_type.waste(later[position]) for position, round_type in earlier.items() if position in later)


def _kinds(stretch: Stretch) -> dict[int, int]:
    return {position: round_type.kinds for position, round_type in stretch.items()}


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
