"""Cost-aware round assignment: no device starts an action later because of the rounds.

A device entering a later round synchronizes with its partners on the way, and stalls on any partner still executing an
earlier round (`Couplings.hops`). So whenever an action starts, the actions running elsewhere must be in late enough
rounds, and its own round must be late enough after its predecessor and its message. Each of these is a lower bound of
one round, given another. The smallest rounds that satisfy all bounds are found action by action, in the order of time;
each raises earlier ones as far as needed. If bounds form a circle, no rounds exist, and the action waits until another
one has ended.

Actions of similar lengths, such as F, I and W, nearly always fit into few body rounds, for any rows.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.couplings import Couplings
from jaxpipe.lowering.rounds import LOCAL_ROUNDS
from jaxpipe.schedules.analysis.dependencies import dependencies, previous_in_row
from jaxpipe.schedules.analysis.timeline import Timeline
from jaxpipe.schedules.schedule import Kind, Schedule, once

CLOSE = 1e-9  # sums of times that should be equal may differ by rounding
Violation = tuple[int, int, int]  # less the place of an action in the order of time; the action; its least round


def fitted_rounds(
    timeline: Timeline, body: Couplings, *, slack_fraction: float = 0.0, may_wait: bool = True
) -> tuple[np.ndarray, np.ndarray] | None:
    """Rounds fitted to `timeline`: [A] round of each action, and [A] round of its message's permute.

    Args:
        timeline: that of a schedule of compute actions alone; messages take no time.
        body: the devices that each body round couples.
        slack_fraction: fraction, 0 to 1, of the time that an action could wait without making the step longer for
            which it does wait. Each value gives other rounds, and may fail to give any.
        may_wait: whether actions start later if no rounds fit.

    Returns:
        The two arrays, or None if no rounds fit and no action may wait.

    Example:
        Two devices, two microbatches, one link in use in every round, F, I and W of one forward each. Device 0 runs
        its F in rounds 0 and 1; the first message travels in 1 and is read in 2, the gradient of it leaves in 4 and
        is read in 5; a W follows in the next round.

        >>> from jaxpipe.lowering.couplings import coupled_bodies
        >>> from jaxpipe.schedules import Schedule, linear, parse_action, simulate
        >>> rows = "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"
        >>> actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
        >>> schedule = Schedule("two", linear(2), 2, actions)
        >>> rounds, _ = fitted_rounds(simulate(schedule), next(coupled_bodies(schedule)))
        >>> rounds.tolist()
        [0, 1, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7]
    """
    fit = _Fit(timeline, body, slack_fraction)
    if not fit.run(may_wait=may_wait):
        return None
    rounds, send_round = np.array([fit.rounds, fit.sent])
    # Without the entry of -1, no action.
    return rounds[:-1], send_round[:-1]


class _Actions(NamedTuple):
    """What does not depend on times and body; by action, and another action is -1 where there is none."""

    first: list[int]  # [D + 1] as in `Columns`
    device: list[int]
    is_weight: list[bool]
    num_awaited: list[int]  # the one before it in its row, and the sender of its message
    following: list[int]  # behind it in its row
    reader: list[int]  # of its message
    sender: list[int]  # of its message, if from another device; and an entry for -1
    unsent: list[int]  # the output of its device that must have left before it
    overwriter: list[int]  # the action before which its own output must have left
    link: list[int]  # source * D + target of its message; -1 if no other device reads it


@once
def _actions_of(compute: Schedule) -> _Actions:
    columns = compute.columns
    device = columns.device
    index = np.arange(len(device))
    message = dependencies(compute).message
    is_weight = columns.is_kind(Kind.W)

    def inverse(senders: np.ndarray) -> np.ndarray:
        readers = np.full(len(device), -1)
        readers[senders[senders >= 0]] = index[senders >= 0]
        return readers

    reader = inverse(message)
    is_sent = (reader >= 0) & (device[reader] != device)
    output = previous_in_row(compute, ~is_weight)
    unsent = np.where(is_sent[output] & (output >= 0) & ~is_weight, output, -1)
    sender = np.where(is_sent[message] & (message >= 0), message, -1)
    before = np.where(columns.position > 0, index - 1, -1)
    link = np.where(is_sent, device * compute.num_devices + device[reader], -1)
    num_awaited = (before >= 0).astype(int) + (message >= 0)
    lists = (columns.first, device, is_weight, num_awaited, inverse(before), reader)
    more = (np.append(sender, -1), unsent, inverse(unsent), link)
    return _Actions(*(values.tolist() for values in (*lists, *more)))


class _Fit:
    """The asynchronous clock, run event by event, with the smallest rounds of the actions that have started.

    The round of an action is bounded from below by that of the action before it in its row; by that in which its
    message travels; and, unless it is a W, by that in which the device's latest output leaves, which it would
    overwrite. And by other devices: `reached` is the round of a device's latest action or, once this has ended, a later
    one to which its neighbours have taken it along. Where a device may be one round behind its neighbour:

        reached   2 1 0   device 0 starts an action in round 3
        reached   3 2 1   device 1, which is in a long action, is raised, and takes device 2 along, which is in none

    Neighbours are enough (`Couplings.hops`): what a device asks of those beyond follows from what it asks of these.
    """

    def __init__(self, timeline: Timeline, body: Couplings, slack_fraction: float):
        self.actions = actions = _actions_of(timeline.schedule)
        num_actions = len(actions.device)
        num_devices = timeline.schedule.num_devices
        self.num_body_rounds = body.num_body_rounds
        self.hops = body.hops
        self.duration = (timeline.end - timeline.start).tolist()
        # Until an action has all that it waits for, the latest end of what it has.
        self.earliest = ((1.0 - slack_fraction) * timeline.start + slack_fraction * timeline.latest_starts).tolist()
        self.num_awaited = list(actions.num_awaited)
        # [action][body round]. A W, which no device waits for, takes a round with permutes: it hides the messages of
        # others. A message that nobody reads travels in any later round.
        to_permutes = body.rounds_to_rendezvous.tolist()
        self.to_allowed = [to_permutes if is_weight else None for is_weight in actions.is_weight]
        links = body.rounds_to_send.transpose(1, 2, 0).reshape(-1, self.num_body_rounds).tolist()
        links.append([1] * self.num_body_rounds)
        self.to_sent = [links[link] for link in actions.link]

        # [action], and an entry for -1, no action, which bounds nothing.
        self.rounds = [*([0] * num_actions), -LOCAL_ROUNDS]
        self.sent = [*([0] * num_actions), -LOCAL_ROUNDS]
        self.place = [-1] * (num_actions + 1)  # in the order of time; -1 for an action that has not started
        self.starts = [0.0] * num_actions
        self.ends = [0.0] * num_actions
        self.num_started = 0
        self.latest = [-1] * num_devices
        self.reached = [0] * num_devices

    def run(self, *, may_wait: bool) -> bool:
        """Runs the clock to its end; returns whether all actions have rounds."""
        # Local names: this loop runs for every action of every fit, and attributes would take a third of its time.
        actions = self.actions
        # One tuple an action, which is faster than one list a field.
        awaited = zip(actions.device, actions.sender[:-1], actions.unsent, strict=True)
        fields = list(zip(awaited, self.to_allowed, self.to_sent, self.duration, strict=True))
        followers = list(zip(actions.following, actions.reader, strict=True))
        place = self.place
        starts = self.starts
        ends = self.ends
        hops = self.hops
        earliest = self.earliest
        num_awaited = self.num_awaited
        rounds = self.rounds
        sent = self.sent
        reached = self.reached
        latest = self.latest
        size = self.num_body_rounds
        ready = [(time, action) for action, time in enumerate(earliest) if not num_awaited[action]]
        heapify(ready)
        while ready:
            now, action = heappop(ready)
            (device, sender, unsent), allowed, to_sent, duration = fields[action]
            last = latest[device]
            least = reached[device]
            # Comparisons, not `max`, whose call takes longer.
            value = least
            bound = rounds[last] + LOCAL_ROUNDS
            if bound > value:
                value = bound
            bound = sent[sender] + LOCAL_ROUNDS
            if bound > value:
                value = bound
            bound = sent[unsent]
            if bound > value:
                value = bound
            if allowed:
                value += allowed[value % size]
            position = value % size
            rounds[action] = value
            sent[action] = value + to_sent[position]
            reached[device] = value
            latest[device] = action
            place[action] = self.num_started
            starts[action] = now
            for other, distance in hops[device][position]:
                if reached[other] < value + distance:
                    has_round = self.raise_others(action)
                    break
            else:
                has_round = True
            if not has_round:  # as before; it is tried again when another one has ended
                latest[device] = last
                reached[device] = least
                place[action] = -1
                if not may_wait:
                    return False
                # Ends that differ by rounding alone count as now: the action would be offered again at once.
                running = (ends[other] for other in latest if other >= 0)
                heappush(ready, (min(end for end in running if end > now + CLOSE), action))
                continue
            self.num_started += 1
            end = ends[action] = now + duration
            for follower in followers[action]:
                if follower >= 0:
                    if earliest[follower] < end:
                        earliest[follower] = end
                    num_awaited[follower] -= 1
                    if not num_awaited[follower]:
                        heappush(ready, (earliest[follower], follower))
        return True

    def raise_others(self, action: int) -> bool:
        """Raises what the round of `action` bounds, and so on; if that would raise `action`, changes nothing."""
        raised: list[tuple[int, int]] = []  # (action, its round before), to be undone
        taken: list[tuple[int, int]] = []  # (device, the round that it had reached)
        ended = self.starts[action] + CLOSE
        self.take_along(self.actions.device[action], taken)
        # Of those that are behind, the ones that run; a heap, of which the last one to start comes first: a circle is
        # soon back at `action`.
        waiting = []
        for device, _ in taken:
            latest = self.latest[device]
            if latest >= 0 and self.ends[latest] > ended:
                waiting.append((-self.place[latest], latest, self.reached[device]))
        heapify(waiting)
        while waiting:
            _, other, value = heappop(waiting)
            before = self.rounds[other]
            if before >= value:
                continue
            if other == action:  # it would have to follow itself
                for index, was in reversed(raised):
                    self.put(index, was)
                for device, was in reversed(taken):
                    self.reached[device] = was
                return False
            if to_allowed := self.to_allowed[other]:
                value += to_allowed[value % self.num_body_rounds]
            raised.append((other, before))
            self.put(other, value)
            device = self.actions.device[other]
            if self.latest[device] == other:
                if self.reached[device] < value:
                    taken.append((device, self.reached[device]))
                    self.reached[device] = value
                self.take_along(device, taken)
            for violation in self.bounded(other):
                heappush(waiting, violation)
        return True

    def put(self, action: int, value: int) -> None:
        """Puts `action` into round `value`."""
        self.rounds[action] = value
        self.sent[action] = value + self.to_sent[action][value % self.num_body_rounds]

    def take_along(self, device: int, taken: list[tuple[int, int]]) -> None:
        """Takes neighbours, theirs, and so on along with `device`; `taken` gets what these had reached before."""
        reached = self.reached
        hops = self.hops
        size = self.num_body_rounds
        stack = [device]
        while stack:
            device = stack.pop()
            value = reached[device]
            for other, distance in hops[device][value % size]:
                least = value + distance
                before = reached[other]
                if before < least:
                    taken.append((other, before))
                    reached[other] = least
                    stack.append(other)

    def bounded(self, action: int) -> list[Violation]:
        """Actions whose round is below what that of `action`, which has been raised, asks for.

        Of a device the first is enough that runs when `action` starts, or starts later, up to the next action of its
        own device: those behind it in its row follow. Devices beyond one that runs then follow that one, and so they
        do if the last action that it ended before is far enough.
        """
        rounds = self.rounds
        place = self.place
        device = self.actions.device[action]
        value = rounds[action]
        asked: list[tuple[int, int]] = []
        if self.actions.sender[self.actions.reader[action]] == action:
            asked.append((self.actions.reader[action], self.sent[action] + LOCAL_ROUNDS))
        asked.append((self.actions.overwriter[action], self.sent[action]))
        until = self.num_started
        following = self.actions.following[action]
        if place[following] >= 0:
            until = place[following]
            asked.append((following, value + LOCAL_ROUNDS))
        farthest = {device: value}
        stack = [device]
        while stack:
            device = stack.pop()
            value = farthest[device]
            for other, distance in self.hops[device][value % self.num_body_rounds]:
                bound = value + distance
                if farthest.get(other, 0) >= bound:  # no round is less than 0
                    continue
                farthest[other] = bound
                stop = self.latest[other] + 1
                first = bisect_left(place, place[action], self.actions.first[other], stop)
                if first > self.actions.first[other] and self.ends[first - 1] > self.starts[action] + CLOSE:
                    first -= 1
                elif first == self.actions.first[other] or rounds[first - 1] < bound:
                    stack.append(other)
                if first < stop and place[first] <= until:
                    asked.append((first, bound))
        return [(-place[other], other, bound) for other, bound in asked if place[other] >= 0 and rounds[other] < bound]
