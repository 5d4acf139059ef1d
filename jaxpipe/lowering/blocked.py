"""Rounds for devices whose permutes hold both ends up: a message travels where both are between two actions.

There two devices meet. A device whose message has not left does only W until then, since any other action would
overwrite it. One that could go on may wait instead for a neighbour that will soon want to meet it. It chooses by the
longest path to the end of the step that either choice leaves, as the asynchronous clock knows it. These paths know
nothing of later waits; so the walk is repeated with paths that are changed at random, and a change is kept if the step
does not become longer. On two devices that finds the shortest step of all (tests try all), or one little longer.

A meeting has a round of its own, in which no device computes, and each pair of devices has a type of round; in the
rounds of actions no device waits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.fitted import CLOSE, latest_starts
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Kind, Schedule

HASTES = (0.0, -0.2, 0.2, -1.0, 1.0)  # forwards: what is added to the path of a device that waits
FEW_CHANGED, MANY_CHANGED = -2.3, -0.5  # powers of ten: the least and the largest fraction of paths changed at once
MOST_WALKS, MOST_STEPS = 1_000, 200_000  # walks, and actions that are begun in all of them together
FAST_IF_BLOCKING = 1.001  # limit of the makespan over the asynchronous one, without transfers


class BlockedRounds(NamedTuple):
    """Rounds of actions and of meetings."""

    rounds: np.ndarray  # [A] the round of each action
    send_round: np.ndarray  # [A] that of its message, if another device reads it
    round_type: np.ndarray  # [R] 0 where actions run; in rounds of any other type one pair of devices meets


def blocked_rounds(compute: Schedule, costs: Costs) -> BlockedRounds:
    """The rounds of the shortest step at `costs` that is found, without time for messages.

    Args:
        compute: a schedule of compute actions alone.
        costs: costs of the actions.

    Example:
        One microbatch: device 0 does its F, both meet, device 1 does F and B, they meet, and device 0 does its B.

        >>> from jaxpipe.schedules import build
        >>> found = blocked_rounds(build("gpipe", num_devices=2, num_microbatches=1), Costs())
        >>> found.rounds.tolist(), found.round_type.tolist()  # 0F0 0B0 1F0 1B0
        ([0, 5, 2, 3], [0, 1, 0, 0, 1, 0])
    """
    rows, timeline = _Rows(compute, costs), simulate(compute, costs)
    path = (timeline.makespan - latest_starts(timeline)).tolist()
    forward = float(np.mean(costs.forward))
    best, haste = min(
        ((rows.walk(path, each * forward), each * forward) for each in HASTES), key=lambda found: found[0].makespan
    )
    # Always the same numbers, so that a schedule always has the same rounds.
    numbers = random.Random(0)
    change = [0.0] * len(path)
    for _ in range(min(MOST_WALKS, MOST_STEPS // len(path))):
        if best.makespan <= FAST_IF_BLOCKING * timeline.makespan:
            break
        fraction = 10 ** numbers.uniform(FEW_CHANGED, MANY_CHANGED)
        tried = [numbers.gauss(0.0, forward) if numbers.random() < fraction else each for each in change]
        found = rows.walk([length + each for length, each in zip(path, tried, strict=True)], haste)
        if found.makespan <= best.makespan:
            best, change = found, tried
    return rows.in_rounds(best.events)


class _Walk(NamedTuple):
    """A step as devices go through it."""

    makespan: float
    events: list[int]  # in the order of time: an action that begins, or ~ that whose message travels


class _Rows:
    """The rows of a schedule, as lists by action."""

    def __init__(self, compute: Schedule, costs: Costs):
        columns = compute.columns
        self.num_devices, self.device = compute.num_devices, columns.device.tolist()
        self.first = columns.first.tolist()
        self.duration = costs.of_kind(compute.num_stages)[columns.kind, columns.stage].tolist()
        self.is_weight = columns.is_kind(Kind.W).tolist()
        self.sender, self.reader, self.target = ([-1] * len(self.device) for _ in range(3))
        self.partners: list[set[int]] = [set() for _ in range(self.num_devices)]
        for sender, reader in np.transpose(dependencies(compute).messages_between(columns.device)).tolist():
            self.sender[reader], self.reader[sender], self.target[sender] = sender, reader, self.device[reader]
            self.partners[self.device[sender]].add(self.device[reader])
            self.partners[self.device[reader]].add(self.device[sender])

    def walk(self, path: Sequence[float], haste: float) -> _Walk:
        """The step in which devices wait for each other as `path` and `haste` say.

        Args:
            path: [A] length of the longest path from the beginning of each action to the end of the step.
            haste: time that is added to the path of a device that waits.
        """
        # By device: its next action, what it does, and until when; the action whose message has not left.
        following, running = self.first[:-1], [-1] * self.num_devices
        until, unsent = [0.0] * self.num_devices, [-1] * self.num_devices
        has_left = [False] * len(self.device)
        ends: list[tuple[float, int]] = []  # heap of (time, device)
        now, events = 0.0, []
        while True:
            for device, action in enumerate(unsent):
                if action >= 0 and running[device] < 0 and running[self.target[action]] < 0:
                    has_left[action], unsent[device] = True, -1
                    events.append(~action)
            ready = [
                action
                for device, action in enumerate(following)
                if self._is_ready(action, device, running, unsent, has_left)
            ]
            # The most urgent one begins first; others may wait for it.
            for action in sorted(ready, key=lambda action: -path[action]):
                device = self.device[action]
                if not self._waits(action, now, path, haste, running, until, unsent):
                    running[device], until[device] = action, now + self.duration[action]
                    heappush(ends, (until[device], device))
                    events.append(action)
            if not ends:
                return _Walk(now, events)
            now = ends[0][0]
            while ends and ends[0][0] <= now + CLOSE:
                _, device = heappop(ends)
                action, running[device] = running[device], -1
                following[device] = action + 1
                if self.reader[action] >= 0:
                    unsent[device] = action

    def _is_ready(
        self, action: int, device: int, running: Sequence[int], unsent: Sequence[int], has_left: Sequence[bool]
    ) -> bool:
        """Whether `device` has ended what it did, and could begin `action`."""
        return (
            running[device] < 0
            and action < self.first[device + 1]
            and (unsent[device] < 0 or self.is_weight[action])
            and (self.sender[action] < 0 or has_left[self.sender[action]])
        )

    def _waits(
        self,
        action: int,
        now: float,
        path: Sequence[float],
        haste: float,
        running: Sequence[int],
        until: Sequence[float],
        unsent: Sequence[int],
    ) -> bool:
        """Whether a device that could begin `action` now waits until a neighbour has ended what it does."""
        device, end = self.device[action], now + self.duration[action]
        for other in self.partners[device]:
            under_way, then = running[other], until[other]
            if under_way < 0 or then >= end - CLOSE:
                continue
            # The longest path to the end of the step if the two meet only when `action` has ended.
            left = -1.0
            message = under_way if self.reader[under_way] >= 0 else unsent[other]
            if message >= 0 and self.target[message] == device:
                left = end + path[self.reader[message]]
                after, begin = under_way + 1, then
                while after < self.first[other + 1] and self.is_weight[after]:
                    begin += self.duration[after]
                    after += 1
                if after < self.first[other + 1]:
                    left = max(left, max(begin, end) + path[after])
            if (own := unsent[device]) >= 0 and self.target[own] == other:
                left = max(left, end + path[self.reader[own]])
            if then + path[action] + haste < left - CLOSE:
                return True
        return False

    def in_rounds(self, events: Sequence[int]) -> BlockedRounds:
        """The first rounds that keep the order of each device's events."""
        rounds, send_round = np.zeros((2, len(self.device)), int)
        last, round_type = [-1] * self.num_devices, list[int]()
        type_of: dict[tuple[int, int], int] = {}
        for event in events:
            if event >= 0:
                device = self.device[event]
                place = last[device] + 1
                while place < len(round_type) and round_type[place]:
                    place += 1
                round_type += [0] * (place == len(round_type))
                rounds[event] = last[device] = place
                continue
            ends = self.device[~event], self.target[~event]
            own = type_of.setdefault((min(ends), max(ends)), len(type_of) + 1)
            # Messages both ways travel in one round.
            place = last[ends[0]]
            if place < 0 or place != last[ends[1]] or round_type[place] != own:
                place = len(round_type)
                round_type.append(own)
            send_round[~event] = last[ends[0]] = last[ends[1]] = place
        return BlockedRounds(rounds, send_round, np.array(round_type))
