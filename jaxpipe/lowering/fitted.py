"""Rounds that are fitted to the asynchronous clock: no device begins an action later because of the rounds.

A device that goes on to a later round meets others on its way, and waits for whom is still in an action of an earlier
round than that of the meeting (`Meetings.least`). So whenever an action begins, the actions at work elsewhere must
stand in rounds that are late enough, as it stands late enough behind the one before it and behind its message. Each of
these says of one round how late it is at the least, given another. The earliest rounds that keep them all are found
action by action, in the order of time, each raising those before as far as it must. Where that goes in a circle there
are none, and the action waits until another one has ended.

Actions of like lengths, such as F, I and W, nearly always fit, into few positions, whatever the row.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from jaxpipe.lowering.bounds import Bounds, By
from jaxpipe.lowering.meetings import Meetings
from jaxpipe.lowering.rounds import LOCAL_ROUNDS
from jaxpipe.lowering.slack import latest_starts
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Kind, Schedule

_CLOSE = 1e-9  # sums of times that should be equal may differ by rounding


def fitted_rounds(
    schedule: Schedule, costs: Costs, body: Meetings, *, share_of_slack: float = 0.0, may_wait: bool = True
) -> tuple[np.ndarray, np.ndarray] | None:
    """[A], [A] the round of each action, and the one in which its message travels.

    Args:
        schedule: compute actions alone.
        costs: of the actions; messages take no time.
        body: who may meet whom.
        share_of_slack: of the time for which an action may wait before the step becomes longer, how much it does
            wait, 0 to 1. Other times fit other rounds, and not all of them may fit.
        may_wait: whether, where no rounds fit, actions begin later.

    Returns:
        None where no rounds fit and no action may wait.
    """
    columns, message = schedule.columns, dependencies(schedule).message
    timeline = simulate(schedule, costs)
    earliest = (1.0 - share_of_slack) * timeline.start + share_of_slack * latest_starts(timeline)
    fit = _Fit(schedule, body, message, earliest, timeline.end - timeline.start)
    if not fit.run(may_wait=may_wait):
        return None
    rounds = np.array(fit.bounds.rounds)
    travels = rounds + 1
    reader = np.flatnonzero((message >= 0) & (columns.device[message] != columns.device))
    sender = message[reader]
    link = columns.device[sender], columns.device[reader]
    travels[sender] = rounds[sender] + body.until_travel[rounds[sender] % body.body_rounds, *link]
    return rounds, travels


class _Fit:
    """The asynchronous clock on its way through the rows, with the rounds of what has begun."""

    def __init__(
        self, schedule: Schedule, body: Meetings, message: np.ndarray, earliest: np.ndarray, duration: np.ndarray
    ):
        columns = schedule.columns
        devices = range(schedule.num_devices)
        self.device, self.message = columns.device.tolist(), message.tolist()
        self.first, self.stop = columns.first[:-1].tolist(), columns.first[1:].tolist()
        self.earliest, self.duration = earliest.tolist(), duration.tolist()
        self.is_weight = columns.is_kind(Kind.W).tolist()
        self.readers: list[list[int]] = [[] for _ in self.device]
        for reader, sender in enumerate(self.message):
            if sender >= 0:
                self.readers[sender].append(reader)

        def of_pairs(rounds: np.ndarray) -> list[list[By]]:
            return [[rounds[:, device, other].tolist() for other in devices] for device in devices]

        # A W, for which nobody waits, hides the messages of others.
        until = np.where(columns.is_kind(Kind.W)[:, None], body.until_meeting, 0)
        self.bounds = Bounds(self.device, until.tolist(), body)
        self.until_sent, self.until_read = of_pairs(body.until_travel), of_pairs(body.until_travel + LOCAL_ROUNDS)

        self.latest = self.bounds.latest
        self.until = [0.0 for _ in devices]  # [device] when that ends
        self.unsent: list[tuple[int, By] | None] = [None for _ in devices]  # its last F, B or I, if it sends
        self.end: list[float | None] = [None for _ in self.device]
        self.ready: list[tuple[float, int]] = []  # heap of (time, action)

    def run(self, *, may_wait: bool) -> bool:
        """Whether all actions have got rounds."""
        for first, stop in zip(self.first, self.stop, strict=True):
            if first < stop:
                self.offer(first)
        while self.ready:
            now, action = heappop(self.ready)
            if self.has_round(action, now):
                self.begin(action, now)
            elif may_wait:
                heappush(self.ready, (min(until for until in self.until if until > now + _CLOSE), action))
            else:
                return False
        return True

    def has_round(self, action: int, now: float) -> bool:
        """Whether `action` can begin, behind all that has begun and before what is at work then."""
        device, sender = self.device[action], self.message[action]
        messages: list[tuple[int, By]] = []
        if sender >= 0 and self.device[sender] != device:
            messages.append((sender, self.until_read[self.device[sender]][device]))
        if (unsent := self.unsent[device]) and not self.is_weight[action]:
            messages.append(unsent)  # its own message would take the place of that
        at_work = [other for other, until in zip(self.latest, self.until, strict=True) if until > now + _CLOSE]
        return self.bounds.add(action, messages, at_work)

    def begin(self, action: int, now: float) -> None:
        device = self.device[action]
        self.end[action] = self.until[device] = now + self.duration[action]
        following = set(self.readers[action])
        if not self.is_weight[action]:
            elsewhere = next((self.device[reader] for reader in following if self.device[reader] != device), None)
            self.unsent[device] = None if elsewhere is None else (action, self.until_sent[device][elsewhere])
        if action + 1 < self.stop[device]:
            following.add(action + 1)
        for each in sorted(following):
            self.offer(each)

    def offer(self, action: int) -> None:
        """Makes `action` ready if it is the next one of its device and its message is on its way."""
        device, sender = self.device[action], self.message[action]
        latest = self.latest[device]
        is_next = action == (latest + 1 if latest >= 0 else self.first[device])
        if is_next and (sender < 0 or self.end[sender] is not None):
            heappush(self.ready, (max(self.ends(latest), self.ends(sender), self.earliest[action]), action))

    def ends(self, action: int) -> float:
        """When `action` ends, which has begun; 0 for -1, which is none."""
        end = self.end[action] if action >= 0 else 0.0
        assert end is not None
        return end
