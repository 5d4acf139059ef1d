"""Rounds for links without asynchronous permutes: sender and receiver both stop while a message travels.

A local search over priorities. Two devices meet when both are between two actions. A device computes on as long as at
most `MOST_UNSENT` of its messages wait. A device that could go on may wait instead for a neighbour that will soon want
to meet it: the choice is that with the shorter of the longest paths to the end of the step, as the asynchronous clock
knows them. These paths know nothing of later waits; so the walk is repeated with paths that are changed at random, and
a change is kept if the step does not become longer. On two devices the search finds the shortest step of all (tests try
all), or one little longer.

A meeting has a round of its own, in which no device computes, and each pair of devices has a type of round; in the
rounds of actions no device waits. Pages travel in meetings, too: at times when neither device waits for the other, if
there are such times, else where they wait least.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.fitted import CLOSE
from jaxpipe.lowering.pages import NO_MOVES, PageMoves
from jaxpipe.lowering.transfers.parked_pages import room_to_meet
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Schedule

HASTES = (0.0, -0.2, 0.2, -1.0, 1.0)  # forwards: what is added to the path of a device that waits
# powers of ten: the least and the largest fraction of paths changed at once
FEW_CHANGED = -2.3
MANY_CHANGED = -0.5
# walks, and actions that are begun in all of them together
MOST_WALKS = 1_000
MOST_STEPS = 200_000
WAITS_FOR_PAGES = (0.0, 0.25, 0.5, 1.0, np.inf)  # of an average action: how long a device may wait for a page
MOST_UNSENT = 2  # messages that a device holds for others; with one, steps are up to a tenth longer
FAST_IF_BLOCKING = 1.001  # limit of the makespan over the asynchronous one, without transfers


class BlockedRounds(NamedTuple):
    """Rounds of actions and of meetings."""

    rounds: np.ndarray  # [A] the round of each action
    send_round: np.ndarray  # [A] that of its message, if another device reads it
    round_type: np.ndarray  # [R] 0 where actions run; in rounds of any other type one pair of devices meets
    moves: PageMoves  # of pages, with the rounds in which they travel


def blocked_step(compute: Schedule, costs: Costs) -> BlockedStep:
    """The shortest step at `costs` that is found, without time for messages.

    Example:
        One microbatch: device 0 does its F, both meet, device 1 does F and B, they meet, and device 0 does its B.

        >>> from jaxpipe.schedules import build
        >>> step = blocked_step(build("gpipe", num_devices=2, num_microbatches=1), Costs()).in_rounds()
        >>> step.rounds.tolist(), step.round_type.tolist()  # 0F0 0B0 1F0 1B0
        ([0, 5, 2, 3], [0, 1, 0, 0, 1, 0])
    """
    rows = _Rows(compute, costs)
    timeline = simulate(compute, costs)
    path = (timeline.makespan - timeline.latest_starts).tolist()
    forward = float(np.mean(costs.forward))
    walks = [(rows.walk(path, haste * forward), haste * forward) for haste in HASTES]
    best, haste = min(walks, key=lambda candidate: candidate[0].makespan)
    # Always the same numbers, so that a schedule always has the same rounds.
    numbers = random.Random(0)
    change = [0.0] * len(path)
    for _ in range(min(MOST_WALKS, MOST_STEPS // len(path))):
        if best.makespan <= FAST_IF_BLOCKING * timeline.makespan:
            break
        fraction = 10 ** numbers.uniform(FEW_CHANGED, MANY_CHANGED)
        tried = [numbers.gauss(0.0, forward) if numbers.random() < fraction else kept for kept in change]
        walk = rows.walk([length + added for length, added in zip(path, tried, strict=True)], haste)
        # Equal ones are taken, too: on a plateau the search goes on elsewhere.
        if walk.makespan <= best.makespan:
            best = walk
            change = tried
    return BlockedStep(rows, best)


class _Walk(NamedTuple):
    """What devices do in a step."""

    makespan: float
    events: list[int]  # in the order of time: an action that begins, or ~ that whose message travels
    start: list[float]  # [A] when each action begins


class _Rows:
    """The rows of a schedule, as lists by action."""

    def __init__(self, compute: Schedule, costs: Costs):
        self.compute = compute
        columns = compute.columns
        self.num_devices = compute.num_devices
        self.device = columns.device.tolist()
        self.first = columns.first.tolist()
        self.duration = costs.of_kind(compute.num_stages)[columns.kind, columns.stage].tolist()
        self.sender, self.reader, self.target = ([-1] * len(self.device) for _ in range(3))
        self.partners: list[set[int]] = [set() for _ in range(self.num_devices)]
        for sender, reader in np.transpose(dependencies(compute).messages_between(columns.device)).tolist():
            self.sender[reader] = sender
            self.reader[sender] = reader
            self.target[sender] = self.device[reader]
            self.partners[self.device[sender]].add(self.device[reader])
            self.partners[self.device[reader]].add(self.device[sender])

    def walk(self, path: Sequence[float], haste: float) -> _Walk:
        """The step in which devices wait for each other as `path` says, [A], the longest one from an action to the end.

        `haste` is time that is added to the path of a device that waits.
        """
        # By device: its next action, what it does, and until when; the actions whose messages have not left.
        following = self.first[:-1]
        running = [-1] * self.num_devices
        until = [0.0] * self.num_devices
        unsent = [list[int]() for _ in range(self.num_devices)]
        has_left = [False] * len(self.device)
        ends: list[tuple[float, int]] = []  # heap of (time, device)
        now = 0.0
        events = list[int]()
        start = [0.0] * len(self.device)
        while True:
            for device, actions in enumerate(unsent):
                leaving = [sent for sent in actions if running[device] < 0 and running[self.target[sent]] < 0]
                for action in leaving:
                    has_left[action] = True
                    actions.remove(action)
                    # The complement, which is negative: a message that travels, in one list with actions that begin.
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
                    running[device] = action
                    start[action] = now
                    until[device] = now + self.duration[action]
                    heappush(ends, (until[device], device))
                    events.append(action)
            if not ends:
                return _Walk(now, events, start)
            now = ends[0][0]
            while ends and ends[0][0] <= now + CLOSE:
                _, device = heappop(ends)
                action, running[device] = running[device], -1
                following[device] = action + 1
                if self.reader[action] >= 0:
                    unsent[device].append(action)

    def _is_ready(
        self, action: int, device: int, running: Sequence[int], unsent: Sequence[list[int]], has_left: Sequence[bool]
    ) -> bool:
        """Whether `device` has ended what it did, and could begin `action`."""
        return (
            running[device] < 0
            and action < self.first[device + 1]
            and (len(unsent[device]) < MOST_UNSENT or self.reader[action] < 0)
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
        unsent: Sequence[list[int]],
    ) -> bool:
        """Whether a device that could begin `action` now waits until a neighbour has ended what it does."""
        device = self.device[action]
        end = now + self.duration[action]
        for other in self.partners[device]:
            under_way = running[other]
            then = until[other]
            if under_way < 0 or then >= end - CLOSE:
                continue
            # All that the other device holds for others when it has ended what it does.
            of_other = [*unsent[other], under_way] if self.reader[under_way] >= 0 else unsent[other]
            to_device = [sent for sent in of_other if self.target[sent] == device]
            to_other = [sent for sent in unsent[device] if self.target[sent] == other]
            # The longest path to the end of the step if the two meet only when `action` has ended; -1, less than any
            # path, if there is nothing between them: then nobody waits.
            left = max((end + path[self.reader[sent]] for sent in (*to_device, *to_other)), default=-1.0)
            if to_device and len(of_other) >= MOST_UNSENT:  # the neighbour does not go on until they have met
                after = under_way + 1
                begin = then
                while after < self.first[other + 1] and self.reader[after] < 0:
                    begin += self.duration[after]
                    after += 1
                if after < self.first[other + 1]:
                    left = max(left, max(begin, end) + path[after])
            if then + path[action] + haste < left - CLOSE:
                return True
        return False


class BlockedStep:
    """A step, which is still to be laid out in rounds.

    Attributes:
        places: [A] where each action begins in the order of time: its events have the places 0, 2, 4 and so on, gaps
            between them 1, 3, 5.
    """

    def __init__(self, rows: _Rows, walk: _Walk):
        self._rows = rows
        self._walk = walk
        self.places = np.zeros(len(rows.device), int)
        for number, event in enumerate(walk.events):
            if event >= 0:
                # Even, so that there is a gap, an odd place, between any two events.
                self.places[event] = 2 * number

    def open_gaps(self) -> Iterator[np.ndarray]:
        """Whether pages may travel between a device and its partner in a place, [places, D]: several choices.

        First in those gaps where neither has to wait; then in those, too, where one waits longer and longer. Of the
        gaps between the same actions of both only the last one counts.
        """
        compute = self._rows.compute
        start = np.array(self._walk.start)
        partner = [compute.placement.partner_of(device) for device in range(compute.num_devices)]
        num_places = 2 * len(self._walk.events)
        room = room_to_meet(compute, self.places, start, start + self._rows.duration, num_places)
        is_last = np.zeros(room.shape, bool)
        # The gap before an action is the last one after the action before it on the same device.
        is_last[self.places - 1, compute.columns.device] = True
        is_last |= is_last[:, partner]
        # Even places are events: nothing else travels there.
        is_last[::2] = False
        for wait in WAITS_FOR_PAGES:
            yield is_last & (room >= -wait * np.mean(self._rows.duration) - CLOSE)

    def in_rounds(self, pages: PageMoves = NO_MOVES) -> BlockedRounds:
        """The first rounds that keep the order of each device's events; `pages` have the places of gaps for rounds."""
        rows = self._rows
        layout = _Layout(self._rows.num_devices)
        rounds, send_round = np.zeros((2, len(rows.device)), int)
        ends = np.sort([pages.home, pages.host], axis=0)
        # Each (place, device, device) is a meeting; pages that travel at the same time, and both ways, share it.
        moves = np.concatenate([[pages.leaves, *ends], [pages.returns, *ends]], axis=1)
        meetings, meeting = np.unique(moves, axis=1, return_inverse=True)
        at_place: dict[int, list[int]] = {}
        for index, place in enumerate(meetings[0].tolist()):
            at_place.setdefault(place, []).append(index)
        met = np.zeros(meetings.shape[1], int)
        for number, event in enumerate(self._walk.events):
            if event >= 0:
                rounds[event] = layout.acts(rows.device[event])
            else:
                send_round[~event] = layout.meet("message", rows.device[~event], rows.target[~event])
            for index in at_place.get(2 * number + 1, ()):
                met[index] = layout.meet("pages", *meetings[1:, index].tolist())
        left, returned = np.split(met[meeting.ravel()], 2)
        moved = replace(pages, leaves=left, returns=returned)
        return BlockedRounds(rounds, send_round, np.array(layout.round_type), moved)


class _Layout:
    """Rounds that are laid out event by event, each in the first one that its devices can still reach."""

    def __init__(self, num_devices: int):
        self.round_type: list[int] = []
        # [device] a round
        self._last = [-1] * num_devices
        self._last_sent = [-1] * num_devices
        self._type_of: dict[tuple[str, int, int], int] = {}

    def acts(self, device: int) -> int:
        """The round of an action."""
        place = self._last[device] + 1
        while place < len(self.round_type) and self.round_type[place]:
            place += 1
        # Behind the last round one of actions, type 0, is added; else the one at `place` is such.
        self.round_type += [0] * (place == len(self.round_type))
        self._last[device] = place
        return place

    def meet(self, content: str, source: int, target: int) -> int:
        """The round in which `source` sends something to `target`. A device sends one message a round."""
        own = self._type_of.setdefault((content, min(source, target), max(source, target)), len(self._type_of) + 1)
        place = self._last[source]
        # Both must be in one meeting of their pair and content, whose message this way has not been sent.
        if not 0 <= place == self._last[target] or self.round_type[place] != own or self._last_sent[source] == place:
            place = len(self.round_type)
            self.round_type.append(own)
        self._last[source] = self._last[target] = self._last_sent[source] = place
        return place
