"""Who meets whom at which position of a loop body, and who waits for whom because of that.

Goes in: the links of a schedule. Comes out: bodies to choose from, and for each of them how many rounds a device may be
behind another without holding it up. Which action stands in which round, `fitted` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.lowering.messages import Pair, permutes_of
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import Schedule

MOST_TURNS = 4  # at which devices may meet their neighbours one by one; of more, a body is too long
NEVER = -(10**9)  # rounds: that far behind is never too far


@dataclass(frozen=True)
class Meetings:
    """A body in which devices meet."""

    num_devices: int
    pairs: tuple[frozenset[Pair], ...]  # [position] (source, target)

    @property
    def body_rounds(self) -> int:
        """P."""
        return len(self.pairs)

    @cached_property
    def until_travel(self) -> np.ndarray:
        """[position, source, target] rounds from an action at a position to the one in which its message may travel."""
        rounds = np.zeros((self.body_rounds, self.num_devices, self.num_devices), dtype=int)
        for position in range(self.body_rounds):
            for later in range(self.body_rounds, 0, -1):
                for pair in self.pairs[(position + later) % self.body_rounds]:
                    rounds[position, *pair] = later
        return rounds

    @cached_property
    def until_meeting(self) -> np.ndarray:
        """[position] rounds until the next one in which anybody meets anybody; 0 if they do at the position."""
        meets = np.array([bool(pairs) for pairs in self.pairs])
        ahead = (np.arange(self.body_rounds)[:, None] + np.arange(self.body_rounds)) % self.body_rounds
        return meets[ahead].argmax(axis=1)

    @cached_property
    def least(self) -> np.ndarray:
        """[position, device, other] the rounds, at most 0, from an action of `device` to what `other` does meanwhile.

        Whoever begins a round at the position has met others in the rounds before it, and they had then begun the round
        of the meeting, and had met others before. If `other` were still in an action of an earlier round than the last
        such meeting, `device` would wait for it.
        """
        met = [_met(pairs, self.num_devices) for pairs in self.pairs]
        rounds = np.full((self.body_rounds, self.num_devices, self.num_devices), NEVER)
        for position in range(self.body_rounds):
            known = np.eye(self.num_devices, dtype=bool)
            rounds[position][known] = 0
            for earlier in range(1, self.body_rounds * self.num_devices + 1):
                now = known @ met[(position - earlier) % self.body_rounds]
                rounds[position][now & ~known] = -earlier
                known = now
        return rounds


def _met(pairs: Iterable[Pair], num_devices: int) -> np.ndarray:
    """[device, other] whether `device` ends a round with these permutes only once `other` has begun it."""
    met = np.eye(num_devices, dtype=bool)
    for permute in permutes_of(pairs):
        partners = np.eye(num_devices, dtype=bool)
        for source, target in permute:
            partners[source, target] = partners[target, source] = True
        met = partners @ met
    return met


def meetings(schedule: Schedule) -> Iterator[Meetings]:
    """Bodies for the messages of `schedule`, compute actions alone, the smallest first.

    In one round everybody meets all neighbours; or it meets them one by one, with a round of nobody after each, as
    in a line of devices over the links (0, 1), (2, 3), ..., then over (1, 2), (3, 4), ...
    """
    columns, message = schedule.columns, dependencies(schedule).message
    reader = np.flatnonzero((message >= 0) & (columns.device[message] != columns.device))
    ends = np.stack([columns.device[message[reader]], columns.device[reader]], axis=1)
    pairs = frozenset((source, target) for source, target in np.unique(ends, axis=0).tolist())
    yield Meetings(schedule.num_devices, (pairs,))
    turns = _turns(pairs)
    if 0 < len(turns) <= MOST_TURNS:
        yield Meetings(schedule.num_devices, tuple(each for turn in turns for each in (turn, frozenset[Pair]())))


def _turns(pairs: frozenset[Pair]) -> list[frozenset[Pair]]:
    """`pairs` cut into turns, in each of which a device meets at most one other."""
    turns: list[set[Pair]] = []
    for link in sorted({(min(pair), max(pair)) for pair in pairs}):
        free = (turn for turn in turns if not any(device in pair for pair in turn for device in link))
        turn = next(free, None)
        if turn is None:
            turns.append(turn := set())
        turn |= {link, link[::-1]} & pairs
    return list(map(frozenset, turns))
