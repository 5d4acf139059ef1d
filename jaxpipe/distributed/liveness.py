"""Decides which process is lost or stuck, from heartbeats and their times: bookkeeping without a clock or JAX.

Every process begins the same activities in the same order (steps, evaluations, checkpoints) and counts them: its
position. All times are seconds of one clock of the caller's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from threading import Lock

from jaxpipe.errors import LostProcess
from jaxpipe.files import LONGEST_WRITE_S

SPEAKS_WITHIN = 0.25  # fraction of the limit within which a living process sends a heartbeat
LONG_TIMES = 10  # an activity of this many longest steps hangs, even if nobody is behind


@dataclass(frozen=True)
class Heartbeat:
    """The report of a process about itself."""

    position: int  # number of activities it has begun
    doing: str  # description of the last activity begun, for messages
    where: str  # host and process id
    number: int = 0  # serial number of the heartbeat, so that a new one differs from the last
    # Whether the activity is a training step; the duration of others (reading, compiling, evaluating, writing) is
    # unknown.
    is_step: bool = False
    end: str | None = None  # None while the process lives; "" if it ended normally, else the error that ended it
    status: int = 0  # exit status of the process after its end
    # Whether the activity waits for a checkpoint that is written in the background. As long as all processes live, it
    # may take a day.
    waits_for_files: bool = False

    def begin(self, doing: str, *, is_step: bool, waits_for_files: bool) -> Heartbeat:
        """The heartbeat of the same process after it has begun one more activity."""
        more = {"is_step": is_step, "waits_for_files": waits_for_files}
        return replace(self, position=self.position + 1, doing=doing, **more)

    def line(self) -> str:
        """The heartbeat as one line of JSON."""
        return json.dumps(asdict(self))


def parse(line: str) -> Heartbeat:
    """The heartbeat that `Heartbeat.line` wrote."""
    return Heartbeat(**json.loads(line))


_UNHEARD = Heartbeat(position=0, doing="", where="")


@dataclass(frozen=True)
class Failure:
    """A process that the others cannot wait for."""

    process: int | None  # number of the process; None if all processes hang and none is behind the others
    why: str  # the cause, as far as it is known
    # Exit status of the processes that cannot continue; the failed one's own if it ended by itself.
    status: int = LostProcess.exit_status


class Liveness:
    """The knowledge of one process about all processes; safe to use from several threads."""

    def __init__(self, own: Heartbeat, *, index: int, count: int, limit_s: float, now: float):
        """Starts without heartbeats of the others.

        Args:
            limit_s: seconds of silence or delay after which a process is lost.
        """
        self.own = own
        self._index = index
        self._limit_s = limit_s
        self._known: dict[int, Heartbeat] = {}
        # Silence counts from the start: a process may be lost before its first heartbeat.
        self._changed_s = {process: now for process in range(count) if process != index}
        self._answered_s = self._began_s = now
        self._longest_s: float | None = None  # the longest of the steps done so far
        self._lock = Lock()

    def begin(self, doing: str, now: float, *, is_step: bool = True, waits_for_files: bool = False) -> None:
        """Notes that this process begins an activity in which it may wait for others."""
        # Of steps alone: how long another activity takes says nothing of a step.
        with self._lock:
            if self.own.is_step:
                self._longest_s = max(self._longest_s or 0.0, now - self._began_s)
            self.own = self.own.begin(doing, is_step=is_step, waits_for_files=waits_for_files)
            self._began_s = now

    def heard(self, heartbeats: dict[int, Heartbeat], now: float) -> None:
        """Notes the newest heartbeat of each process, as the store has them."""
        with self._lock:
            self._answered_s = now
            for process, heartbeat in heartbeats.items():
                # A heartbeat without news has a new number, so that equal ones mean silence.
                if process != self._index and heartbeat != self._known.get(process):
                    self._known[process] = heartbeat
                    self._changed_s[process] = now

    def start_anew(self, now: float) -> None:
        """Forgets the times so far, after a pause in which this process could hear nothing."""
        with self._lock:
            self._answered_s = self._began_s = now
            self._changed_s = dict.fromkeys(self._changed_s, now)

    def where(self, process: int) -> str:
        """Host and process id of `process` and its last activity, as far as it has reported them."""
        heartbeat = self.own if process == self._index else self._known.get(process)
        return "never heard of" if heartbeat is None else f"{heartbeat.where}; its last: {heartbeat.doing}"

    def failure(self, now: float, *, patience: float = 1.0) -> Failure | None:
        """The first process that the others cannot wait for, or None."""
        with self._lock:
            limit_s = patience * self._limit_s
            silent_s = now - self._answered_s
            if silent_s > limit_s:
                return Failure(0, f"the store that it holds has not answered for {silent_s:.0f} s")
            return self._ended_or_silent(limit_s) or self._stuck(now, limit_s)

    def _ended_or_silent(self, limit_s: float) -> Failure | None:
        for process, changed_s in self._changed_s.items():
            heartbeat = self._known.get(process, _UNHEARD)
            if heartbeat.end:
                return Failure(process, f"it ended: {heartbeat.end}", heartbeat.status)
            silent_s = self._answered_s - changed_s  # while the store did answer
            if heartbeat.end is None and silent_s > limit_s:
                return Failure(process, f"nothing heard of it for {silent_s:.0f} s")
        return None

    def _stuck(self, now: float, limit_s: float) -> Failure | None:
        waited_s = now - self._began_s
        others = {process: heartbeat for process, heartbeat in self._known.items() if heartbeat.end is None}
        slowest = min([self.own, *others.values()], key=lambda heartbeat: heartbeat.position)
        limit_s = limit_s if slowest.is_step else LONG_TIMES * limit_s
        if waited_s <= limit_s:
            return None
        for process, heartbeat in others.items():
            if heartbeat.position == slowest.position < self.own.position:
                return Failure(process, f"it has not begun {self.own.doing}, in which others wait for {waited_s:.0f} s")
        if any(heartbeat.position > self.own.position for heartbeat in others.values()):
            return Failure(self._index, f"it is in {self.own.doing} for {waited_s:.0f} s, and others are further")
        if self.own.waits_for_files and waited_s < LONGEST_WRITE_S:
            return None
        # The position of a process that has just fallen silent is not known yet.
        all_speak = (
            now - min([self._answered_s, *(self._changed_s[process] for process in others)]) < SPEAKS_WITHIN * limit_s
        )
        longest_s = limit_s if self._longest_s is None else self._longest_s
        if all_speak and waited_s > LONG_TIMES * longest_s:
            return Failure(None, f"every process has been in {self.own.doing} for {waited_s:.0f} s")
        return None
