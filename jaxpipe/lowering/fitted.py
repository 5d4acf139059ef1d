"""Cost-aware round assignment: no device starts an action later because of the rounds.

A device entering a later round synchronizes with its partners on the way, and stalls on any partner still executing an
earlier round (`Couplings.min_distance`). So whenever an action starts, the actions running elsewhere must be in
late enough rounds, and its own round must be late enough after its predecessor and its message. Each of these is
a lower bound of one round, given another. The smallest rounds that satisfy all bounds are found action by action, in
the order of time; each raises earlier ones as far as needed (`RoundConstraints`). If bounds form a circle, no rounds
exist, and the action waits until another one has ended.

Actions of similar lengths, such as F, I and W, nearly always fit into few body rounds, for any rows.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from jaxpipe.lowering.couplings import Couplings, Distance, RoundConstraints
from jaxpipe.lowering.rounds import LOCAL_ROUNDS
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import Timeline
from jaxpipe.schedules.schedule import Kind, Schedule

CLOSE = 1e-9  # sums of times that should be equal may differ by rounding


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
        >>> from jaxpipe.schedules import linear, parse_action, simulate
        >>> rows = "0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"
        >>> actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
        >>> schedule = Schedule("two", linear(2), 2, actions)
        >>> rounds, _ = fitted_rounds(simulate(schedule), next(coupled_bodies(schedule)))
        >>> rounds.tolist()
        [0, 1, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7]
    """
    compute = timeline.schedule
    columns = compute.columns
    needs = dependencies(compute)
    earliest = (1.0 - slack_fraction) * timeline.start + slack_fraction * timeline.latest_starts
    assignment = _Assignment(compute, body, needs.message, earliest, timeline.end - timeline.start)
    if not assignment.run(may_wait=may_wait):
        return None
    rounds = np.array(assignment.constraints.rounds)
    # Nobody reads the messages of other actions, so any later round will do.
    send_round = rounds + 1
    sender, reader = needs.messages_between(columns.device)
    link = columns.device[sender], columns.device[reader]
    send_round[sender] = rounds[sender] + body.rounds_to_send[rounds[sender] % body.num_body_rounds, *link]
    return rounds, send_round


class _Assignment:
    """The asynchronous clock, run event by event, with the rounds of started actions."""

    def __init__(
        self, compute: Schedule, body: Couplings, message: np.ndarray, earliest: np.ndarray, duration: np.ndarray
    ):
        columns = compute.columns
        devices = range(compute.num_devices)
        self.device = columns.device.tolist()
        self.message = message.tolist()
        self.first = columns.first[:-1].tolist()
        self.stop = columns.first[1:].tolist()
        self.earliest = earliest.tolist()
        self.duration = duration.tolist()
        self.is_weight = columns.is_kind(Kind.W).tolist()
        self.readers: list[list[int]] = [[] for _ in self.device]
        for reader, sender in enumerate(self.message):
            if sender >= 0:
                self.readers[sender].append(reader)

        def by_link(rounds: np.ndarray) -> list[list[Distance]]:
            return [[rounds[:, device, other].tolist() for other in devices] for device in devices]

        # A W, which no device waits for, takes a round with permutes: it hides the messages of others.
        to_allowed = np.where(columns.is_kind(Kind.W)[:, None], body.rounds_to_rendezvous, 0)
        self.constraints = RoundConstraints(self.device, to_allowed.tolist(), body)
        self.to_sent = by_link(body.rounds_to_send)
        self.to_read = by_link(body.rounds_to_send + LOCAL_ROUNDS)

        self.latest = self.constraints.latest
        self.busy_until = [0.0 for _ in devices]  # [device] when its latest action ends
        self.unsent: list[tuple[int, Distance] | None] = [None for _ in devices]  # its last F, B or I, if it sends
        self.end: list[float | None] = [*(None for _ in self.device), 0.0]  # the last is that of -1, no action
        self.ready: list[tuple[float, int]] = []  # heap of (time, action)

    def run(self, *, may_wait: bool) -> bool:
        """Runs the clock to its end; returns whether all actions have rounds."""
        for first, stop in zip(self.first, self.stop, strict=True):
            if first < stop:
                self.offer(first)
        while self.ready:
            now, action = heappop(self.ready)
            if self.has_round(action, now):
                self.begin(action, now)
            elif may_wait:
                # Ends that differ by rounding alone count as now: the action would be offered again at once.
                heappush(self.ready, (min(until for until in self.busy_until if until > now + CLOSE), action))
            else:
                return False
        return True

    def has_round(self, action: int, now: float) -> bool:
        """Whether a round exists for `action` after everything started and before everything still running."""
        device = self.device[action]
        sender = self.message[action]
        messages: list[tuple[int, Distance]] = []
        if sender >= 0 and self.device[sender] != device:
            messages.append((sender, self.to_read[self.device[sender]][device]))
        if (unsent := self.unsent[device]) and not self.is_weight[action]:
            messages.append(unsent)  # the action's own message would overwrite that one
        ended = now + CLOSE
        running = [other for other, until in zip(self.latest, self.busy_until, strict=True) if until > ended]
        return self.constraints.add(action, messages, running)

    def begin(self, action: int, now: float) -> None:
        device = self.device[action]
        self.end[action] = self.busy_until[device] = now + self.duration[action]
        following = set(self.readers[action])
        if not self.is_weight[action]:
            elsewhere = next((self.device[reader] for reader in following if self.device[reader] != device), None)
            self.unsent[device] = None if elsewhere is None else (action, self.to_sent[device][elsewhere])
        if action + 1 < self.stop[device]:
            following.add(action + 1)
        for follower in sorted(following):
            self.offer(follower)

    def offer(self, action: int) -> None:
        """Makes `action` ready if it is the next one of its device and its message has been sent."""
        device = self.device[action]
        sender = self.message[action]
        latest = self.latest[device]
        is_next = action == (latest + 1 if latest >= 0 else self.first[device])
        after = self.end[latest]
        read = self.end[sender]
        if is_next and after is not None and read is not None:
            heappush(self.ready, (max(after, read, self.earliest[action]), action))
