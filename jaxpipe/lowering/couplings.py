"""Couplings: the devices that wait for each other at the permutes of a loop body, and the rounds that actions may get.

A permute is a rendezvous: both devices of a pair have to start its round before either ends it. Goes in: the links of
a schedule. Comes out: loop bodies to choose from (`coupled_bodies`); for each, the number of rounds by which a device
may be behind another without holding it up (`Couplings.min_distance`); and the smallest rounds that satisfy all these
difference constraints (`RoundConstraints`). Left to `fitted`: the order in which actions get rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

import numpy as np

from jaxpipe.lowering.permutes import Pair, permutes_of
from jaxpipe.lowering.rounds import LOCAL_ROUNDS
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Schedule

MAX_TURNS = 4  # turns in which devices meet their neighbours one by one; with more, a body is too long
UNBOUNDED = -(10**9)  # rounds: no distance is too small

# ---- Loop bodies, and the distances that their permutes enforce ----


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
    def min_distance(self) -> np.ndarray:
        """[body round, device, other] least rounds, at most 0, from an action of `device` to that of `other` then.

        A device that begins this body round had a rendezvous with others in earlier rounds, directly or through
        third devices, and these had then begun the round of the rendezvous. If `other` were still in an action of an
        earlier round than the last such rendezvous, `device` would wait for it.

        Example:
            Three devices in a line, all coupled in every round: a neighbour may be one round behind, the other end two.

            >>> line = frozenset({(0, 1), (1, 0), (1, 2), (2, 1)})
            >>> Couplings(3, (line,)).min_distance[0].tolist()
            [[0, -1, -1], [-1, 0, -1], [-1, -1, 0]]
        """
        waited_for = [waits_for(permutes_of(pairs), self.num_devices) for pairs in self.pairs]
        rounds = np.full((self.num_body_rounds, self.num_devices, self.num_devices), UNBOUNDED)
        for body_round in range(self.num_body_rounds):
            known = np.eye(self.num_devices, dtype=bool)
            rounds[body_round][known] = 0
            # Back in time: the devices that `device` has waited for, those that they had waited for, ...
            for earlier in range(1, self.num_body_rounds * self.num_devices + 1):
                reached = known @ waited_for[(body_round - earlier) % self.num_body_rounds]
                rounds[body_round][reached & ~known] = -earlier
                known = reached
        return rounds


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


# ---- The smallest rounds that keep all distances ----

Distance = list[int]  # [body round] least rounds from an action there to another one
Violation = tuple[int, int, int]  # less the place of an action in the order of time; the action; its least round


class RoundConstraints:
    """Incremental longest-path solver: the smallest rounds that satisfy all difference constraints.

    Actions are added in the order of time in which they start. This order determines the bounds of an action: the
    latest action of every device when it starts, and the actions whose messages it reads. The action bounds in turn
    those that run then. A raised round raises those that it bounds; if the bounds form a circle, there is no solution.

    Attributes:
        rounds: [action] round of each action that has started.
        latest: [device] the action that started last, -1 before the first.
    """

    def __init__(self, device: list[int], rounds_to_allowed: list[list[int]], body: Couplings):
        """Prepares the solver, without actions.

        Args:
            device: [action] its device; the actions of a device are consecutive.
            rounds_to_allowed: [action][body round] rounds to the next body round that it may take.
            body: the devices that each body round couples.
        """
        self.device = device
        self.rounds_to_allowed = rounds_to_allowed
        distance = body.min_distance.copy()
        # To itself a device keeps the order of its row; `min_distance` has 0 there.
        distance[:, range(body.num_devices), range(body.num_devices)] = LOCAL_ROUNDS
        self.distance: list[list[Distance]] = distance.tolist()  # [body round][device][other]
        self.num_body_rounds = body.num_body_rounds
        self.rounds = [0] * len(device)
        self.latest = [-1] * body.num_devices
        self.started: list[int] = []
        self.place = [-1] * len(device)  # [action] index in `started`
        self.running: list[list[int]] = [[] for _ in device]  # [action] running on other devices when it started
        # [action] the actions that read its message, and their least distance
        self.messages: list[list[tuple[int, Distance]]] = [[] for _ in device]
        # [device][other] the least round of the next action of `other`, as bounded by the latest action of the device
        self.reach = [[0] * body.num_devices for _ in range(body.num_devices)]

    def add(self, action: int, messages: list[tuple[int, Distance]], running: list[int]) -> bool:
        """Gives `action`, the next one of its device, a round if there is one.

        Args:
            action: the action, which has not started yet.
            messages: actions that bound it because of a message, with their distances.
            running: the latest actions of other devices, as far as they are still running.

        Returns:
            Whether a round exists; if not, nothing has changed.

        Example:
            Two devices that meet in every round. Device 0 runs a long action 0 while device 1 runs actions 2, 3, 4. A
            device may be one round ahead of the other: 2 and 3 take rounds 0 and 1; 4, in round 2, raises 0 to 1.

            >>> body = Couplings(2, (frozenset({(0, 1), (1, 0)}),))
            >>> constraints = RoundConstraints([0, 0, 1, 1, 1], [[0]] * 5, body)
            >>> [constraints.add(action, [], [0] if action else []) for action in (0, 2, 3, 4)]
            [True, True, True, True]
            >>> constraints.rounds
            [1, 0, 0, 1, 2]
        """
        rounds = self.rounds
        device = self.device[action]
        value = max([row[device] for row in self.reach])
        for other, distance in messages:
            value = max(value, rounds[other] + distance[rounds[other] % self.num_body_rounds])
            self.messages[other].append((action, distance))
        rounds[action] = self._allowed(action, value)
        self.place[action] = len(self.started)
        self.started.append(action)
        self.running[action] = running

        changed: list[tuple[int, int]] = []  # (action, its round before), to be undone
        reach = self._reach_of(action)
        waiting = self._behind(running, reach)
        heapify(waiting)  # of those to be raised the last one to start comes first: a circle is soon back at `action`
        while waiting:
            _, other, value = heappop(waiting)
            if rounds[other] >= value:
                continue
            if other == action:  # it would have to follow itself
                for raised, was in reversed(changed):
                    self._put(raised, was)
                for sender, _ in messages:
                    self.messages[sender].pop()
                # As before the call: the caller tries the action again when another one has ended.
                self.place[self.started.pop()] = -1
                return False
            changed.append((other, rounds[other]))
            self._put(other, self._allowed(other, value))
            for violation in self._violations(other):
                heappush(waiting, violation)
        self.latest[device] = action
        self.reach[device] = reach
        return True

    def _allowed(self, action: int, value: int) -> int:
        """The earliest round from `value` on that `action` may take."""
        return value + self.rounds_to_allowed[action][value % self.num_body_rounds]

    def _put(self, action: int, value: int) -> None:
        self.rounds[action] = value
        device = self.device[action]
        if self.latest[device] == action:
            self.reach[device] = self._reach_of(action)

    def _reach_of(self, action: int) -> list[int]:
        """The least round of an action that starts on each device while `action` is the latest of its own, [device]."""
        value = self.rounds[action]
        return [value + least for least in self.distance[value % self.num_body_rounds][self.device[action]]]

    def _violations(self, action: int) -> list[Violation]:
        """Actions whose round violates a lower bound that `action` imposes."""
        rounds = self.rounds
        device = self.device
        place = self.place
        following = action + 1
        # `place` is -1 for an action that has not started; the next of the list may be another device's.
        is_last = following == len(device) or device[following] != device[action] or place[following] < 0
        stop = len(self.started) if is_last else place[following] + 1
        # The action bounds those running when it started, and those started since, up to the next of its device.
        bounded = (*self.running[action], *self.started[place[action] + 1 : stop])
        value = rounds[action]
        behind = ((other, value + least[value % self.num_body_rounds]) for other, least in self.messages[action])
        return self._behind(bounded, self._reach_of(action)) + [
            (-place[other], other, bound) for other, bound in behind if rounds[other] < bound
        ]

    def _behind(self, actions: Iterable[int], reach: list[int]) -> list[Violation]:
        """Those of `actions` whose round is below what `reach`, [device], asks of their device."""
        rounds = self.rounds
        device = self.device
        place = self.place
        return [(-place[other], other, bound) for other in actions if rounds[other] < (bound := reach[device[other]])]
