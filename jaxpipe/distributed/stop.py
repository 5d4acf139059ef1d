"""SIGTERM and SIGINT: every process of a run stops after the same step, whichever of them got the signal."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from jaxpipe.distributed.join import Store

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FOLDER = "stop/"


class Stop:
    """Whether the run is to stop; a context manager, because it takes over the signals.

    All processes do the same things in the same order, and count them: positions. A process that has got a signal
    writes into the store, before it begins its next position, that the run stops after that one. No process ends a
    step that another has not begun: so after that step, and not before, all of them read it and stop.

    Attributes:
        reason: "" or which process got which signal.
    """

    def __init__(self, store: Store, *, process: int):
        """Of the process with number `process`."""
        self.reason = ""
        self._store, self._process = store, process
        self._position = 0
        self._got, self._has_told = "", False
        self._before: dict[int, object] = {}

    def begin(self) -> None:
        """Begins the next position; tells the others first of a signal that this process has got."""
        self._position += 1
        if self._got and not self._has_told:  # once: others may already have read it
            self._store.set(f"{FOLDER}{self._process}", f"{self._position} {self._got}")
            self._has_told = True

    def is_asked(self) -> bool:
        """Whether to stop now: asked after the same step, all processes get the same answer."""
        asked = {int(process): text.split() for process, text in self._store.under(FOLDER).items()}
        due = {process: name for process, (position, name) in asked.items() if int(position) <= self._position}
        self.reason = " and ".join(f"process {process} got {name}" for process, name in sorted(due.items()))
        return bool(due)

    def __enter__(self) -> Stop:
        """Listens."""
        for number in SIGNALS:
            self._before[number] = signal.signal(number, self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # as signal.signal returned it

    def _listen(self, number: int, frame: FrameType | None) -> None:
        self._got = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # who presses twice does not want to wait
