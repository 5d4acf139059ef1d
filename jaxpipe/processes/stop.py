"""SIGTERM and SIGINT: every process of a run stops after the same step, whichever of them got the signal."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from jaxpipe.processes.store import Store

SIGNALS = (signal.SIGTERM, signal.SIGINT)
FOLDER = "stop/"


class Stop:
    """Whether the run is to stop; a context manager, because it takes over the signals.

    A process that has got a signal says so in the store before it begins its next step, and no process ends a step
    that another has not begun: so all of them read it after that step. A second signal is Python's own again.

    Attributes:
        reason: "" or which signal, and which process got it.
    """

    def __init__(self, store: Store, *, process: int):
        """Of the process with number `process`."""
        self.reason = ""
        self._store, self._process = store, process
        self._got = ""
        self._before: dict[int, object] = {}

    def tell(self) -> None:
        """Tells the others of a signal that this process has got; before it joins them in a step."""
        if self._got:
            self._store.set(f"{FOLDER}{self._process}", self._got)
            self._got = ""

    def is_asked(self) -> bool:
        """Whether to stop; asked after the same step, all processes get the same answer."""
        asked = self._store.under(FOLDER)
        if asked:
            self.reason = " and ".join(f"process {process} got {name}" for process, name in sorted(asked.items()))
        return bool(asked)

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
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
