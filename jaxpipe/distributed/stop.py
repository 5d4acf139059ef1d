"""SIGTERM and SIGINT: all processes of a run stop after the same step, whichever of them received the signal."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from jaxpipe.distributed.join import Store

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FOLDER = "stop/"


class Stop:
    """A request to stop the run; a context manager, because it takes over the signals.

    All processes begin the same activities in the same order and count them: positions. A process that received a
    signal writes into the store, before it begins its next position, that the run stops after that one. No process
    ends a step that another has not begun, so all read the request after that step, and not before.

    Attributes:
        reason: "", or which process received which signal.
    """

    def __init__(self, store: Store, *, process: int):
        """Listens for signals to the process with number `process`, once entered."""
        self.reason = ""
        self._store, self._process = store, process
        self._position = 0
        self._got, self._has_told = "", False
        self._before: dict[int, object] = {}

    def begin(self) -> None:
        """Begins the next position; first tells the others about a signal that this process received."""
        self._position += 1
        if self._got and not self._has_told:  # only once, since others may have read it already
            self._store.set(f"{FOLDER}{self._process}", f"{self._position} {self._got}")
            self._has_told = True

    def is_asked(self) -> bool:
        """Whether to stop now; all processes that ask after the same step get the same answer."""
        asked = {int(process): text.split() for process, text in self._store.under(FOLDER).items()}
        due = {process: name for process, (position, name) in asked.items() if int(position) <= self._position}
        self.reason = " and ".join(f"process {process} got {name}" for process, name in sorted(due.items()))
        return bool(due)

    def __enter__(self) -> Stop:
        """Takes over the signals."""
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restores the former handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # as signal.signal returned it

    def _listen(self, number: int, frame: FrameType | None) -> None:
        self._got = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second Ctrl-C does not wait
