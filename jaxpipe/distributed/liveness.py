"""Who of the processes is lost or stuck, from what was heard of each and when: pure bookkeeping, without clock or jax.

Every process does the same things in the same order (steps, evaluations, checkpoints), and counts them: its position.
Times are seconds of one clock, whichever.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from threading import Lock

from jaxpipe.errors import LostProcess

SPEAKS_WITHIN = 0.25  # of the limit
LONG_TIMES = 10  # as long as the longest step so far: what takes longer hangs, even where nobody is behind


@dataclass(frozen=True)
class Life:
    """What a process tells of itself.

    Attributes:
        position: how many things it has begun.
        doing: the last of them, in words.
        where: host and process id.
        number: of the line, so that a new one differs from the last.
        is_step: whether it is a step of the run; how long another thing takes (reading, compiling, evaluating, writing)
            nobody knows.
        end: None while it lives; "" where it ended as it should, else the error that ended it.
        status: its exit status then.
    """

    position: int
    doing: str
    where: str
    number: int = 0
    is_step: bool = False
    end: str | None = None
    status: int = 0

    def begin(self, doing: str, *, is_step: bool) -> Life:
        """The same process, one thing further."""
        return replace(self, position=self.position + 1, doing=doing, is_step=is_step)

    def line(self) -> str:
        """As text."""
        return json.dumps(asdict(self))


def parse(line: str) -> Life:
    """What `Life.line` wrote."""
    return Life(**json.loads(line))


@dataclass(frozen=True)
class Loss:
    """A process that the others cannot wait for.

    Attributes:
        process: its number; None where all hang and none is behind the others.
        why: what is known, in words.
        status: with which those end that cannot go on; where it ended by itself, its own.
    """

    process: int | None
    why: str
    status: int = LostProcess.exit_status


class Lives:
    """What one process knows of all; several threads may ask and tell."""

    def __init__(self, own: Life, *, index: int, limit_s: float, now: float):
        """Knows nothing yet of the others.

        Args:
            own: what this process tells of itself.
            index: of this process.
            limit_s: who is silent or behind for longer is lost.
            now: the time.
        """
        self.own = own
        self._index, self._limit_s = index, limit_s
        self._known: dict[int, Life] = {}
        self._changed_s: dict[int, float] = {}
        self._answered_s = self._began_s = now
        self._longest_s: float | None = None  # of the steps done so far
        self._lock = Lock()

    def begin(self, doing: str, now: float, *, is_step: bool = True) -> None:
        """This process begins something that it may wait for others in."""
        with self._lock:
            if self.own.is_step:
                self._longest_s = max(self._longest_s or 0.0, now - self._began_s)
            self.own, self._began_s = self.own.begin(doing, is_step=is_step), now

    def heard(self, lives: dict[int, Life], now: float) -> None:
        """What the store holds, process -> its newest line."""
        with self._lock:
            self._answered_s = now
            for process, life in lives.items():
                if life != self._known.get(process):
                    self._known[process], self._changed_s[process] = life, now

    def start_anew(self, now: float) -> None:
        """After a time in which this process could hear nothing."""
        with self._lock:
            self._answered_s = self._began_s = now
            self._changed_s = dict.fromkeys(self._changed_s, now)

    def where(self, process: int) -> str:
        """Host and process id of `process`, as far as it has told, and what it began last."""
        life = self.own if process == self._index else self._known.get(process)
        return "never heard of" if life is None else f"{life.where}; its last: {life.doing}"

    def lost(self, now: float, *, patience: float = 1.0) -> Loss | None:
        """The first process that cannot be waited for any more.

        Args:
            now: the time.
            patience: in limits.
        """
        with self._lock:
            limit_s, silent_s = patience * self._limit_s, now - self._answered_s
            if silent_s > limit_s:
                return Loss(0, f"the store that it holds has not answered for {silent_s:.0f} s")
            return self._ended_or_silent(limit_s) or self._stuck(now, limit_s)

    def _ended_or_silent(self, limit_s: float) -> Loss | None:
        for process, life in self._others().items():
            if life.end:
                return Loss(process, f"it ended: {life.end}", life.status)
            silent_s = self._answered_s - self._changed_s[process]  # while the store did answer
            if life.end is None and silent_s > limit_s:
                return Loss(process, f"nothing heard of it for {silent_s:.0f} s")
        return None

    def _stuck(self, now: float, limit_s: float) -> Loss | None:
        waited_s = now - self._began_s
        others = {process: life for process, life in self._others().items() if life.end is None}
        slowest = min([self.own, *others.values()], key=lambda life: life.position)
        limit_s = limit_s if slowest.is_step else LONG_TIMES * limit_s
        if waited_s <= limit_s:
            return None
        for process, life in others.items():
            if life.position == slowest.position < self.own.position:
                return Loss(process, f"it has not begun {self.own.doing}, in which others wait for {waited_s:.0f} s")
        if any(life.position > self.own.position for life in others.values()):
            return Loss(self._index, f"it is in {self.own.doing} for {waited_s:.0f} s, and others are further")
        # Of a process that has just fallen silent nobody knows yet how far it is.
        all_speak = (
            now - min([self._answered_s, *(self._changed_s[process] for process in others)]) < SPEAKS_WITHIN * limit_s
        )
        longest_s = limit_s if self._longest_s is None else self._longest_s
        if all_speak and waited_s > LONG_TIMES * longest_s:
            return Loss(None, f"every process has been in {self.own.doing} for {waited_s:.0f} s")
        return None

    def _others(self) -> dict[int, Life]:
        return {process: life for process, life in self._known.items() if process != self._index}
