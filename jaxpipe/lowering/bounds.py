"""The earliest rounds that are late enough, each given others.

By whom an action is bounded follows from the order in which all begin: what was the latest of any device when it began,
and its messages, bound it; it bounds what was at work then. Whatever is raised raises those that it bounds.
"""

from __future__ import annotations

from jaxpipe.lowering.meetings import Meetings
from jaxpipe.lowering.rounds import LOCAL_ROUNDS

By = list[int]  # [position] rounds from an action there to the earliest one of another


class Bounds:
    """Rounds of actions, which are given one after the other as they begin.

    Attributes:
        rounds: [action], of those that have begun.
        latest: [device] the action that has begun last, -1 before the first.
    """

    def __init__(self, device: list[int], until: list[list[int]], body: Meetings):
        """None has begun.

        Args:
            device: [action]; those of a device follow each other.
            until: [action][position] rounds to the next position where it may stand.
            body: who may meet whom.
        """
        self.device = device
        self.until = until
        least = body.least.copy()
        least[:, range(body.num_devices), range(body.num_devices)] = LOCAL_ROUNDS
        self.least: list[list[list[int]]] = least.tolist()  # [position][device][other]
        self.body_rounds = body.body_rounds
        self.rounds = [0] * len(device)
        self.latest = [-1] * body.num_devices
        self.begun: list[int] = []
        self.place = [-1] * len(device)  # [action] in `begun`
        self.at_work: list[list[int]] = [[] for _ in device]  # [action] on other devices, when it began
        self.messages: list[list[tuple[int, By]]] = [[] for _ in device]  # [action] actions behind its message
        # [device][other] the least round for what `other` begins next, as the device's latest action has it
        self.reach = [[0] * body.num_devices for _ in range(body.num_devices)]

    def add(self, action: int, messages: list[tuple[int, By]], at_work: list[int]) -> bool:
        """Gives `action`, the next of its device, its round if it has one.

        Args:
            action: that has not begun yet.
            messages: actions that it stands behind because of a message, and by how much.
            at_work: the latest of other devices, if they are still at work.

        Returns:
            Whether there is a round; if there is none, nothing has changed.
        """
        rounds, device = self.rounds, self.device[action]
        value = max(row[device] for row in self.reach)
        for other, by in messages:
            value = max(value, rounds[other] + by[rounds[other] % self.body_rounds])
            self.messages[other].append((action, by))
        rounds[action] = value + self.until[action][value % self.body_rounds]
        self.place[action] = len(self.begun)
        self.begun.append(action)
        self.at_work[action] = at_work
        old: list[tuple[int, int]] = []
        waiting = self._too_early(action)
        while waiting:
            other, value = waiting.pop()
            if rounds[other] >= value:
                continue
            if other == action:
                for changed, was in reversed(old):
                    self._put(changed, was)
                for sender, _ in messages:
                    self.messages[sender].pop()
                self.place[self.begun.pop()] = -1
                return False
            old.append((other, rounds[other]))
            self._put(other, value + self.until[other][value % self.body_rounds])
            waiting += self._too_early(other)
        self.latest[device], self.reach[device] = action, self._reach_of(action)
        return True

    def _put(self, action: int, value: int) -> None:
        self.rounds[action] = value
        device = self.device[action]
        if self.latest[device] == action:
            self.reach[device] = self._reach_of(action)

    def _reach_of(self, action: int) -> list[int]:
        """[device] the least round for what begins there while `action` is its device's latest."""
        value = self.rounds[action]
        return [value + by for by in self.least[value % self.body_rounds][self.device[action]]]

    def _too_early(self, action: int) -> list[tuple[int, int]]:
        """Those that `action` bounds and that stand before their bound, with that bound."""
        rounds, device, reach = self.rounds, self.device, self._reach_of(action)
        following = action + 1
        is_last = following == len(device) or device[following] != device[action] or self.place[following] < 0
        stop = len(self.begun) if is_last else self.place[following] + 1
        met = (*self.at_work[action], *self.begun[self.place[action] + 1 : stop])
        found = [(other, bound) for other in met if rounds[other] < (bound := reach[device[other]])]
        value = rounds[action]
        messages = ((other, value + by[value % self.body_rounds]) for other, by in self.messages[action])
        return found + [(other, bound) for other, bound in messages if rounds[other] < bound]
