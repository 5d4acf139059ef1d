"""The watch over the other processes of a run: one that is lost or stuck ends all the others, with a message.

Without it a process whose neighbour has gone waits in a collective for ever. Every process writes a line into the
store again and again: that it lives, and how far it is. Of whom no new line comes is lost (killed, stopped, its
machine gone); who has not begun what others wait in is stuck. Process 0 holds the store: where that does not answer,
it is the lost one. Left to others: who is lost (`lives`).
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

from jaxpipe.distributed.join import Processes, Store, leave, reaches_first
from jaxpipe.distributed.liveness import Life, Lives, Loss, parse
from jaxpipe.distributed.log import log
from jaxpipe.errors import JaxpipeError, LostProcess

DECIDED_AT = 0.75  # of the bound: the rest is for telling it and ending
SUSPECTED_AT = 0.5  # of the time after which a process is lost
READ_WITHIN_PERIODS = 4
WORDS_OF_COLLECTIVES = ("Gloo", "gloo", "NCCL", "onnection", "ollective")
LIVES, VERDICT = "lives/", "verdict/"


class Watch:
    """Watches while it is entered; alone, a process has nobody to watch."""

    def __init__(self, store: Store, processes: Processes, *, lost_after_s: float):
        """Of one process over all `processes`.

        Args:
            store: that of the run.
            processes: all, and which this is.
            lost_after_s: so long after a process is lost or stuck all others have ended.
        """
        self._store, self._processes, self._lost_after_s = store, processes, lost_after_s
        self._period_s = min(1.0, lost_after_s / 20)
        own = Life(position=0, doing="its start", where=f"host {socket.gethostname()}, pid {os.getpid()}")
        self._lives = Lives(own, index=processes.index, limit_s=DECIDED_AT * lost_after_s, now=time.monotonic())
        self._ended, self._telling = threading.Event(), threading.Lock()

    def begin(self, doing: str, *, is_step: bool) -> None:
        """Says what this process begins and may have to wait for others in; all begin the same things in turn."""
        self._lives.begin(doing, time.monotonic(), is_step=is_step)

    def __enter__(self) -> Watch:
        """Begins."""
        if self._processes.count > 1:
            at_abort(self._before_abort)
            for work in (self._exchange, self._judge):
                threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends, and tells the others why no more lines will come.

        The loss of another process shows as an error of a collective, too: so that one waits until a loss would have
        been seen; the process ends meanwhile if that is what it was.
        """
        if self._processes.count == 1:
            return
        if error is not None and _is_of_collective(error):
            self._ended.wait(self._lost_after_s)
        if error is None or isinstance(error, SystemExit):
            self._tell_the_last("", 0)
            return
        status = error.exit_status if isinstance(error, JaxpipeError) else 1
        self._tell_the_last(f"{type(error).__name__}: {error}".partition("\n")[0], status)
        self._wait_as_first()

    def _wait_as_first(self) -> None:
        """The store ends with process 0: the others read first."""
        if self._processes.is_first:
            time.sleep(READ_WITHIN_PERIODS * self._period_s)

    def _tell(self, life: Life) -> None:
        with self._telling:
            if not self._ended.is_set():
                self._store.set(f"{LIVES}{self._processes.index}", life.line())

    def _tell_the_last(self, end: str, status: int) -> None:
        life = replace(self._lives.own, end=end, status=status)
        with self._telling:  # no line of the other thread may come behind this one
            self._ended.set()
            self._store.set(f"{LIVES}{self._processes.index}", life.line())

    def _exchange(self) -> None:
        """One thread, which hangs where the store does."""
        number = 0
        while not self._ended.wait(self._period_s):
            number += 1
            try:
                self._tell(replace(self._lives.own, number=number))
                lines, verdict = self._store.under(LIVES), self._store.under(VERDICT)
            except Exception as error:  # whatever jax's client raises; that no lines come is seen by the judge
                log(f"the store does not answer: {error}")
                continue
            self._lives.heard({int(process): parse(line) for process, line in lines.items()}, time.monotonic())
            if verdict:
                status, _, message = verdict["0"].partition(" ")
                _end(message, int(status))

    def _judge(self) -> None:
        """The other thread, which hangs nowhere."""
        last = time.monotonic()
        while not self._ended.wait(self._period_s):
            now = time.monotonic()
            if now - last > 10 * self._period_s:
                self._lives.start_anew(now)  # this process itself was stopped
            last = now
            if loss := self._lives.lost(now):
                message = self._message(loss)
                if self._processes.is_first:
                    self._store.set(f"{VERDICT}0", f"{loss.status} {message}")
                self._wait_as_first()
                _end(message, loss.status)

    def _before_abort(self) -> None:
        if not self._ended.is_set() and not reaches_first():
            # Process 0 may have left because of another, and this one be late to see why.
            suspect = self._lives.lost(time.monotonic(), patience=SUSPECTED_AT) or Loss(0, "its port is closed")
            _end(self._message(suspect), suspect.status)

    def _message(self, loss: Loss) -> str:
        count, process = self._processes.count, loss.process
        if process is None:
            what, where, repair = f"all {count} processes hang", "", "look at the network; if steps take that long, "
        else:
            what, where = f"process {process} of {count} is lost", f"      {self._lives.where(process)}\n"
            repair = f"look into logs/process_{process:04}.log and at its machine; if steps take that long, "
        return (
            f"{what}: {loss.why}\n"
            f"  rule processes-alive: a process is heard of, and no step stands, for train.lost_after_s="
            f"{self._lost_after_s:g}\n"
            f"{where}"
            f"  repair: start the run again, it goes on from its newest checkpoint; {repair}"
            "set a larger train.lost_after_s"
        )


def _is_of_collective(error: BaseException) -> bool:
    return any(word in str(error) for word in WORDS_OF_COLLECTIVES)


def _end(message: str, status: int) -> None:
    text = f"{LostProcess.__name__}: {message}"
    log(text)
    print(f"\n{text}", file=sys.stderr)
    leave(status)


# ---- JAX aborts a process as soon as the coordination service, which process 0 holds, is gone, and reports that in
# its own terms. `at_abort` prints ours first.

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_kept = []  # the C side holds no reference


def at_abort(call: Callable[[], None]) -> None:
    """Runs `call` when this process aborts, in the thread that does; where it returns, the abort goes on.

    A handler of Python's `signal` would wait for the main thread, which an abort never lets run again.
    """
    handler = _HANDLER(lambda number: call())
    _kept.append(handler)
    ctypes.CDLL(None).signal(int(signal.SIGABRT), handler)
