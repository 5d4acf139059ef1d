"""The processes of a run: a signal stops all after the same step, and a failure ends all instead of hanging them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from types import FrameType, TracebackType

from jaxpipe.distributed.join import Store, exit_now, join
from jaxpipe.distributed.log import log, only_log
from jaxpipe.distributed.watch import Watch
from jaxpipe.errors import JaxpipeError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # mpirun hands on the last at once, SIGTERM after a while
FOLDER = "stop/"


class Stop:
    """A request to stop the run; a context manager, because it takes over the signals.

    All processes begin the same activities in the same order and count them: positions. A process that received a
    signal writes into the store, before it begins its next position, that the run stops after that one. No process
    ends a step that another has not begun, so all read the request after that step, and not before.
    """

    def __init__(self, store: Store, *, process: int):
        """Listens for signals to the process with number `process`, once entered."""
        self.reason = ""  # "", or which process received which signal
        self._store = store
        self._process = process
        self._position = 0
        self._got = ""
        self._has_told = False
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
        # In the main thread alone, as Python asks.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._listen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # as signal.signal returned it

    def _listen(self, number: int, frame: FrameType | None) -> None:
        self._got = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)  # a second Ctrl-C does not wait
            # Not by print, in the middle of which the signal may have come.
            os.write(2, b"SIGINT: stops after the next step, with a checkpoint; a second one ends at once\n")


# The group, from joining to leaving


class ProcessGroup:
    """The processes of a run, seen from one of them; a context manager."""

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *,
        lost_after_s: float,
    ):
        """Joins the other processes; returns when all have joined."""
        processes = join(coordinator_address, num_processes, process_id)
        self.index = processes.index  # number of this process; process 0 prints, and writes the files that exist once
        self.count = processes.count  # number of processes
        self._store = Store()
        self.stop = Stop(self._store, process=self.index)  # the request to stop after a signal
        self._watch = Watch(self._store, processes, lost_after_s=lost_after_s)
        if not self.is_first:
            only_log()

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    def agree(self, on: str, text: str) -> str:
        """Returns the `text` that process 0 passes under the same name `on`; waits for it, and needs no devices."""
        return self._store.broadcast_from_first(f"agreed/{on}", text, is_first=self.is_first)

    def meet(self, at: str) -> None:
        """Waits until all processes are there; needs no devices, whose first exchange on CPUs waits for 30 s alone."""
        self._store.wait_for_all(f"met/{at}")

    def begin(self, doing: str, *, is_step: bool = False, waits_for_files: bool = False) -> None:
        """Announces the next activity, in which this process may wait for others; all begin the same ones in turn.

        Args:
            doing: the activity, for messages.
            is_step: whether it is a training step; other activities may take ten times as long.
            waits_for_files: whether it waits for a checkpoint, as long as all processes live.
        """
        self.stop.begin()
        self._watch.begin(doing, is_step=is_step, waits_for_files=waits_for_files)

    def stops_after_step(self) -> bool:
        """Whether a signal asks the run to stop; every process gets the same answer after the same step."""
        return self.stop.is_asked()

    def __enter__(self) -> ProcessGroup:
        self._watch.__enter__()
        self.stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends watch and signals; one failing process of several exits at once, so as not to wait at a barrier."""
        self.stop.__exit__(kind, error, trace)
        if error is not None:
            log("".join(traceback.format_exception(error)))
        self._watch.__exit__(kind, error, trace)
        if self.count > 1 and error is not None and not isinstance(error, SystemExit):
            if isinstance(error, JaxpipeError):
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                exit_now(error.exit_status)
            traceback.print_exception(error)
            exit_now(1)
