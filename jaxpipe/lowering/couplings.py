"""Couplings: the devices that wait for each other at the permutes of a loop body.

A permute is a rendezvous: both devices of a pair have to start its round before either ends it. Goes in: the links of
a schedule. Comes out: loop bodies to choose from (`coupled_bodies`); for each, the number of rounds by which a device
may be behind another without holding it up (`Couplings.hops`). Left to `fitted`: the rounds of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.lowering.permutes import Pair, permutes_of
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Schedule

MAX_TURNS = 4  # turns in which devices meet their neighbours one by one; with more, a body is too long


@dataclass(frozen=True)
class Couplings:
    """A loop body, with the pairs of devices that each round couples."""

    num_devices: int
    pairs: tuple[frozenset[Pair], ...]  # [body round] (source, target)

    @property
    def num_body_rounds(self) -> int:
        """Rounds of the body."""
        return len(self.pairs)

    @cached_property
    def rounds_to_send(self) -> np.ndarray:
        """[body round, source, target] rounds from an action to the next one in which its message may travel.

        Example:
            >>> links = frozenset({(0, 1), (1, 0)})
            >>> Couplings(2, (links, frozenset())).rounds_to_send[:, 0, 1].tolist()
            [2, 1]
        """
        rounds = np.zeros((self.num_body_rounds, self.num_devices, self.num_devices), dtype=int)
        for body_round in range(self.num_body_rounds):
            # From the farthest round to the nearest, which overwrites the others.
            for later in range(self.num_body_rounds, 0, -1):
                for pair in self.pairs[(body_round + later) % self.num_body_rounds]:
                    rounds[body_round, *pair] = later
        return rounds

    @cached_property
    def rounds_to_rendezvous(self) -> np.ndarray:
        """[body round] rounds until the next one with any permute; 0 if this round has one."""
        is_coupled = np.array([bool(pairs) for pairs in self.pairs])
        ahead = (np.arange(self.num_body_rounds)[:, None] + np.arange(self.num_body_rounds)) % self.num_body_rounds
        return is_coupled[ahead].argmax(axis=1)

    @cached_property
    def hops(self) -> list[list[list[tuple[int, int]]]]:
        """[device, body round] -> (another one, the rounds, below 0, from an action of `device` then to one of it).

        A device that begins this body round had a rendezvous with the other one in an earlier round, which the other
        one had then begun. If it were still in an action of a round before the last such rendezvous, the device would
        wait for it. So it is with third devices, which the other one had waited for.

        Example:
            Three devices in a line, all coupled upwards in each round: a neighbour may be one round behind. With a
            second permute, downwards, so may the neighbour's neighbour: it had a part in the first one.

            >>> up = frozenset({(0, 1), (1, 2)})
            >>> Couplings(3, (up,)).hops
            [[[(1, -1)]], [[(0, -1), (2, -1)]], [[(1, -1)]]]
            >>> Couplings(3, (up | {(1, 0), (2, 1)},)).hops[0]
            [[(1, -1), (2, -1)]]
        """
        size = self.num_body_rounds
        waited_for = np.array([waits_for(permutes_of(pairs), self.num_devices) for pairs in self.pairs])
        waited_for[:, range(self.num_devices), range(self.num_devices)] = False
        # [device, other, body round]; from the farthest round back to the nearest, which overwrites the others.
        rounds = np.zeros((self.num_devices, self.num_devices, size), int)
        for earlier in range(size, 0, -1):
            rounds[waited_for[(np.arange(size) - earlier) % size].transpose(1, 2, 0)] = -earlier
        return [
            [[(other, to_other) for other, to_other in enumerate(to_others) if to_other] for to_others in of_device]
            for of_device in rounds.transpose(0, 2, 1).tolist()
        ]


def waits_for(permutes: Iterable[Iterable[Pair]], num_devices: int) -> np.ndarray:
    """Whether `device` can end a round with these permutes only after `other` has begun it, [device, other]."""
    waits = np.eye(num_devices, dtype=bool)  # a device has begun its own round
    for permute in permutes:  # in sequence: waiting in one permute includes the waits of the one before
        partners = np.eye(num_devices, dtype=bool)
        for source, target in permute:
            partners[source, target] = partners[target, source] = True
        waits = partners @ waits
    return waits


def coupled_bodies(compute: Schedule) -> Iterator[Couplings]:
    """Loop bodies that carry the messages of `compute`, a schedule of compute actions alone, the smallest first.

    Either every device sends to all neighbours in one round; or to those of higher number in one round and to those of
    lower number in the next; or it meets them one by one, with a round without permutes after each, as in a line of
    devices over the links (0, 1), (2, 3), ..., then over (1, 2), (3, 4), ...
    """
    device = compute.columns.device
    links = np.stack([device[ends] for ends in dependencies(compute).messages_between(device)], axis=1)
    pairs = frozenset((source, target) for source, target in np.unique(links, axis=0).tolist())
    yield Couplings(compute.num_devices, (pairs,))
    half = compute.num_devices / 2  # in a ring, the last device sends up to the first
    up = frozenset((source, target) for source, target in pairs if (target - source) % compute.num_devices <= half)
    if up and up != pairs:
        yield Couplings(compute.num_devices, (up, pairs - up))
    turns = _turns(pairs)
    if 0 < len(turns) <= MAX_TURNS:
        yield Couplings(compute.num_devices, tuple(coupled for turn in turns for coupled in (turn, frozenset[Pair]())))


def _turns(pairs: frozenset[Pair]) -> list[frozenset[Pair]]:
    """Divides `pairs` into turns; in each turn a device meets at most one other."""
    turns: list[set[Pair]] = []
    for link in sorted({(min(pair), max(pair)) for pair in pairs}):
        free = (turn for turn in turns if not any(device in pair for pair in turn for device in link))
        turn = next(free, None)
        if turn is None:
            turns.append(turn := set())
        turn |= {link, link[::-1]} & pairs
    return list(map(frozenset, turns))
