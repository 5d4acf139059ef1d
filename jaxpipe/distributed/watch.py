"""Watches the other processes of a run: when one is lost or stuck, all others end with a message that names it.

Without the watch, a process whose neighbour is gone would wait in a collective forever. Every process writes heartbeats
into the store: that it is alive, and how far it is. A process without new heartbeats is lost (killed, stopped, or its
machine is gone); one that has not begun what others wait in is stuck. Process 0 holds the store, so if that does not
answer, process 0 is lost. `liveness` decides who is lost.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from jaxpipe.distributed.join import Rank, Store, exit_now, reaches_first
from jaxpipe.distributed.liveness import Failure, Heartbeat, Liveness, parse
from jaxpipe.distributed.log import log
from jaxpipe.errors import JaxpipeError, LostProcess, explain

DECIDED_AT = 0.75  # fraction of the bound; the rest is for the message and the exit
SUSPECTED_AT = 0.5  # fraction of the time after which a process counts as lost
READ_WITHIN_PERIODS = 4
COLLECTIVE_ERRORS = ("Gloo", "gloo", "NCCL", "onnection", "ollective")
HEARTBEATS = "lives/"
VERDICT = "verdict/"


class Watch:
    """Watches the other processes while it is entered; does nothing for a single process."""

    def __init__(self, store: Store, processes: Rank, *, lost_after_s: float):
        """Prepares the watch of one process over all others."""
        self._store = store
        self._processes = processes
        self._lost_after_s = lost_after_s
        self._period_s = min(1.0, lost_after_s / 20)
        own = Heartbeat(position=0, doing="its start", where=f"host {socket.gethostname()}, pid {os.getpid()}")
        self._liveness = Liveness(
            own, index=processes.index, count=processes.count, limit_s=DECIDED_AT * lost_after_s, now=time.monotonic()
        )
        self._ended = threading.Event()
        self._telling = threading.Lock()

    def begin(self, doing: str, *, is_step: bool, waits_for_files: bool) -> None:
        """Announces the next activity, in which this process may wait for others; all begin the same ones in turn."""
        self._liveness.begin(doing, time.monotonic(), is_step=is_step, waits_for_files=waits_for_files)

    def __enter__(self) -> Watch:
        if self._processes.count > 1:
            at_abort(self._before_abort)
            for work in (self._beat, self._judge):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the watch and tells the others why no more heartbeats will come.

        The loss of another process may first appear here as an error of a collective. Then wait until the watch would
        have seen the loss; if it was one, the watch ends this process meanwhile.
        """
        if self._processes.count == 1:
            return
        if error is not None and any(word in str(error) for word in COLLECTIVE_ERRORS):
            self._ended.wait(self._lost_after_s)
        if error is None or isinstance(error, SystemExit):
            self._send_last("", 0)
            return
        status = error.exit_status if isinstance(error, JaxpipeError) else 1
        self._send_last(f"{type(error).__name__}: {error}".partition("\n")[0], status)
        self._wait_as_first()

    def _wait_as_first(self) -> None:
        """Waits in process 0, which holds the store, until the others have read the last heartbeat."""
        if self._processes.is_first:
            time.sleep(READ_WITHIN_PERIODS * self._period_s)

    def _send_last(self, end: str, status: int) -> None:
        heartbeat = replace(self._liveness.own, end=end, status=status)
        with self._telling:  # no heartbeat of the other thread may follow this one
            self._ended.set()
            self._store.set(f"{HEARTBEATS}{self._processes.index}", heartbeat.line())

    def _beat(self) -> None:
        """Sends and receives heartbeats, in a thread that hangs when the store does."""
        number = 0
        while not self._ended.wait(self._period_s):
            number += 1
            try:
                heartbeat = replace(self._liveness.own, number=number)
                with self._telling:
                    if not self._ended.is_set():
                        self._store.set(f"{HEARTBEATS}{self._processes.index}", heartbeat.line())
                lines = self._store.under(HEARTBEATS)
                verdict = self._store.under(VERDICT)
            except Exception as error:  # whatever JAX's client raises; `_judge` sees that no heartbeats come
                log(f"the store does not answer: {error}")
                continue
            self._liveness.heard({int(process): parse(line) for process, line in lines.items()}, time.monotonic())
            if verdict:
                status, _, message = verdict["0"].partition(" ")
                _end(message, int(status))

    def _judge(self) -> None:
        """Looks for a failure, in a thread that never hangs."""
        last = time.monotonic()
        while not self._ended.wait(self._period_s):
            now = time.monotonic()
            # No pause of this thread is so long: the process was stopped, or its machine slept.
            if now - last > 10 * self._period_s:
                self._liveness.start_anew(now)  # this process itself was stopped
            last = now
            if failure := self._liveness.failure(now):
                message = self._message(failure)
                if self._processes.is_first:
                    self._store.set(f"{VERDICT}0", f"{failure.status} {message}")
                self._wait_as_first()
                _end(message, failure.status)

    def _before_abort(self) -> None:
        if not self._ended.is_set() and not reaches_first():
            # Process 0 may have ended because of another process, and this one learns the reason late.
            suspect = self._liveness.failure(time.monotonic(), patience=SUSPECTED_AT) or Failure(
                0, "its port is closed"
            )
            _end(self._message(suspect), suspect.status)

    def _message(self, failure: Failure) -> str:
        count = self._processes.count
        process = failure.process
        if process is None:
            what = f"all {count} processes hang"
            where = ""
            repair = "look at the network; if steps take that long, "
        else:
            what = f"process {process} of {count} is lost"
            where = self._liveness.where(process)
            repair = f"look into logs/process_{process:04}.log and at its machine; if steps take that long, "
        return explain(
            f"{what}: {failure.why}",
            rule=(
                "processes-alive: every process reports, and no step stands still, within"
                f" train.lost_after_s={self._lost_after_s:g}"
            ),
            picture=where,
            repair=(
                f"start the run again: it resumes from its newest checkpoint; {repair}set a larger train.lost_after_s"
            ),
        )


def _end(message: str, status: int) -> None:
    text = f"{LostProcess.__name__}: {message}"
    log(text)
    print(f"\n{text}", file=sys.stderr)
    exit_now(status)


# ---- JAX aborts a process as soon as the coordination service, which process 0 holds, is gone, and reports that in
# its own terms. `at_abort` prints ours first.

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept = []  # the C side holds no reference


def at_abort(call: Callable[[], None]) -> None:
    """Runs `call` when this process aborts (SIGABRT), in the aborting thread; then the abort goes on.

    A Python signal handler would wait for the main thread, which never runs again after an abort.
    """
    handler = _HANDLER(lambda number: call())
    _kept.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
