"""Local processes that start together, stop together and end together.

Takes a command and an environment for each process; prints their lines, returns one exit code. Each output has a thread
that prints its lines; processes and signals are checked ten times a second.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import IO, Any

from jaxpipe.distributed.ports import free_port

JOIN_FLAGS = ("coordinator_address", "num_processes", "process_id")  # flags by which processes find each other
STOPPED = 75  # exit code of a process that stopped on request, its checkpoint saved; EX_TEMPFAIL of <sysexits.h>
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_EVERY_S = 0.1
_LAST_OUTPUT_S = 1.0  # to wait for output in a pipe that another process holds open
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def commands_of(program: Sequence[str], arguments: Sequence[str], count: int) -> list[list[str]]:
    """The command of each of `count` local processes that run one Python program and find each other.

    Args:
        program: the arguments of Python, as ("-m", "jaxpipe.train"); the program takes the flags `JOIN_FLAGS`.
    """
    address = f"localhost:{free_port()}"
    values = [(address, count, process) for process in range(count)]
    return [
        [sys.executable, *program, *arguments, *(f"--{f}={v}" for f, v in zip(JOIN_FLAGS, value, strict=True))]
        for value in values
    ]


class Group:
    """Local processes that run one program together; a context manager that leaves none of them behind.

    Each process leads its own process group, so Ctrl-C in a terminal reaches only the launcher, which passes it on.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        *,
        grace_s: float,
        outputs: tuple[IO[bytes], IO[bytes]] | None = None,
    ):
        """Describes the processes, each by its command and environment; entering the context starts them.

        Args:
            grace_s: seconds from SIGTERM to SIGKILL for processes that still run after one has failed.
            outputs: streams for stdout and stderr of all processes; by default this process's own.
        """
        self._commands = commands
        self._environments = environments
        self._grace_s = grace_s
        self._outputs = outputs or (sys.stdout.buffer, sys.stderr.buffer)
        self._printing = threading.Lock()
        self._printers: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._caught: list[int] = []
        self._handlers: dict[int, object] = {}
        self._is_told = False
        self._failed: int | None = None
        self._kill_at: float | None = None

    def __enter__(self) -> Group:
        """Starts the processes, all from this thread and before any other thread exists."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, for example
                self._handlers[number] = signal.signal(number, lambda caught, frame: self._caught.append(caught))
        # Looked up here, since a forked process should do little. Elsewhere a killed launcher leaves processes behind.
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        self._processes = [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=prctl and partial(_end_with_parent, prctl, os.getpid()),
            )
            for command, environment in zip(self._commands, self._environments, strict=True)
        ]
        self._running = dict(enumerate(self._processes))
        for process, child in self._running.items():
            for number, stream in ((0, child.stdout), (1, child.stderr)):
                # A daemon, since another process may hold the pipe open for ever.
                self._printers.append(threading.Thread(target=self._copy, args=(process, stream, number), daemon=True))
                self._printers[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills the processes that still run and restores the signal handlers."""
        self._kill()
        for child in self._processes:
            child.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # as signal.signal returned it

    def wait(self) -> int:
        """Returns the exit code when all processes have ended."""
        while self._running:
            time.sleep(_LOOK_EVERY_S)
            self._look_for_ends()
            self._pass_on_signals()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._say(f"killed {_in_words(self._running)}, which still ran {self._grace_s:g} s later")
                self._kill()
                # Once: those that are killed may take a while to end.
                self._kill_at = float("inf")
        last = time.monotonic() + _LAST_OUTPUT_S
        for printer in self._printers:
            printer.join(max(0.0, last - time.monotonic()))
        # As a shell reports it: 128 + n for a process ended by signal n.
        codes = [child.returncode if child.returncode >= 0 else 128 - child.returncode for child in self._processes]
        if self._failed is not None:
            return codes[self._failed]
        return STOPPED if STOPPED in codes else 0

    def _pass_on_signals(self) -> None:
        while self._caught:
            number = self._caught.pop(0)
            if not self._is_told:
                number = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
                self._say(f"handed {signal.Signals(number).name} on to all processes")
                self._tell(number)
            elif number == signal.SIGINT:
                self._say("SIGINT once more: killed all processes")
                self._kill()

    def _look_for_ends(self) -> None:
        """Removes processes that have ended from the list; the first failure ends the others."""
        for process, child in list(self._running.items()):
            if child.poll() is None:
                continue
            _kill_group(child)  # and the processes that it left behind
            del self._running[process]
            if self._failed is None and child.returncode not in (0, STOPPED):
                self._failed = process
        if self._failed is not None and self._kill_at is None:
            code = self._processes[self._failed].returncode
            how = f"was ended by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
            then = f"; {_in_words(self._running)} to end within {self._grace_s:g} s" if self._running else ""
            self._say(f"process {self._failed} {how}{then}")
            self._kill_at = time.monotonic() + self._grace_s
            if not self._is_told:  # a second SIGTERM would end them in the middle of a checkpoint
                self._tell(signal.SIGTERM)

    def _tell(self, number: int) -> None:
        self._is_told = True
        for child in self._running.values():
            child.send_signal(number)

    def _kill(self) -> None:
        for child in self._running.values():
            _kill_group(child)

    def _copy(self, process: int, stream: IO[bytes], number: int) -> None:
        """Prints the lines of a process with its number before them; a last one may lack its end."""
        with stream:
            for line in stream:
                self._print(number, b"[%d] %b\n" % (process, line.removesuffix(b"\n")))

    def _print(self, number: int, line: bytes) -> None:
        """Writes a line to output `number`; if nobody reads it any more, the run continues without it."""
        with self._printing:
            try:
                self._outputs[number].write(line)
                self._outputs[number].flush()
            except OSError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._outputs[number].fileno())

    def _say(self, text: str) -> None:
        self._print(1, f"jaxpipe.launch: {text}\n".encode())


def _end_with_parent(prctl: Any, parent: int) -> None:
    """Has the system end this new process when its parent ends, even by SIGKILL (prctl(2), PR_SET_PDEATHSIG).

    The signal arrives when the thread that started the process ends, so start processes from a thread that lives as
    long as its process. As with every fork, no other thread may run then.
    """
    prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:  # the parent has ended meanwhile, and no signal will come
        os._exit(1)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):  # all have ended; on macOS: only zombies remain
        os.killpg(child.pid, signal.SIGKILL)


def _in_words(processes: Collection[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
