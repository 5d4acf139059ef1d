"""Local processes that start together, stop together and end together.

Takes a command and an environment for each process; prints their lines, returns one exit code. A single thread waits
for their output and checks processes and signals ten times a second.
"""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType
from typing import IO

JOIN_FLAGS = ("coordinator_address", "num_processes", "process_id")  # flags by which processes find each other
STOPPED = 75  # exit code of a process that stopped on request, its checkpoint saved; EX_TEMPFAIL of <sysexits.h>
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_EVERY_S = 0.1
_LAST_OUTPUT_S = 1.0  # to wait for output in a pipe that another process holds open
_PIECE_BYTES = 65536
_ERASE_LINE = b"\x1b[K"  # erases another process's progress bar


def commands_of(program: Sequence[str], arguments: Sequence[str], count: int) -> list[list[str]]:
    """The command of each of `count` local processes that run one Python program and find each other.

    Args:
        program: the arguments of Python, as ("-m", "jaxpipe.train"); the program takes the flags `JOIN_FLAGS`.
        arguments: arguments of the program, the same for all processes.
        count: number of processes.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
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
        """Describes the processes; entering the context starts them.

        Args:
            commands: the command of each process.
            environments: the environment of each process.
            grace_s: seconds from SIGTERM to SIGKILL for processes that still run after one has failed.
            outputs: streams for stdout and stderr of all processes; by default this process's own.
        """
        self._commands = commands
        self._environments = environments
        self._grace_s = grace_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._streams = selectors.DefaultSelector()
        out, err = outputs or (sys.stdout.buffer, sys.stderr.buffer)
        self._outputs: dict[int, IO[bytes]] = {1: out, 2: err}
        self._erase = {number: _ERASE_LINE if output.isatty() else b"" for number, output in self._outputs.items()}
        self._caught: list[int] = []
        self._handlers: dict[int, object] = {}
        self._is_told = False
        self._failed: int | None = None
        self._kill_at: float | None = None

    def __enter__(self) -> Group:
        """Starts the processes, all from this thread and before any other thread exists."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, for example
                self._handlers[number] = signal.signal(number, self._catch)
        prepare = end_with_parent()
        for process, (command, environment) in enumerate(zip(self._commands, self._environments, strict=True)):
            child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
                preexec_fn=prepare,
            )
            self._processes.append(child)
            self._running[process] = child
            for number, stream in ((1, child.stdout), (2, child.stderr)):
                assert stream is not None
                self._streams.register(stream, selectors.EVENT_READ, (number, Lines(process)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Kills the processes that still run and restores the signal handlers."""
        self._kill()
        for child in self._processes:
            child.wait()
        for key in list(self._streams.get_map().values()):
            self._close(key)
        self._streams.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]  # as signal.signal returned it

    def wait(self) -> int:
        """Prints the output of the processes until all have ended; returns the exit code."""
        while self._running:
            self._print_available(_LOOK_EVERY_S)
            self._look_for_ends()
            self._pass_on_signals()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._say(f"killed {_in_words(self._running)}, which still ran {self._grace_s:g} s later")
                self._kill()
                # Once: those that are killed may take a while to end.
                self._kill_at = float("inf")
        while self._streams.get_map() and self._print_available(_LAST_OUTPUT_S):
            pass
        codes = [_exit_code(child.returncode) for child in self._processes]
        if self._failed is not None:
            return codes[self._failed]
        return STOPPED if STOPPED in codes else 0

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._caught.append(number)

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
            self._end_others(self._failed)

    def _end_others(self, failed: int) -> None:
        code = self._processes[failed].returncode
        how = f"was ended by {_signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
        then = f"; {_in_words(self._running)} to end within {self._grace_s:g} s" if self._running else ""
        self._say(f"process {failed} {how}{then}")
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

    def _print_available(self, timeout_s: float) -> bool:
        """Prints available output, waiting up to `timeout_s` for it; returns whether there was any."""
        if not self._streams.get_map():
            time.sleep(timeout_s)  # all outputs are closed, but not all processes have ended
        ready = self._streams.select(timeout_s)
        for key, _ in ready:
            number, lines = key.data
            piece = os.read(key.fd, _PIECE_BYTES)
            self._print(number, lines.feed(piece) if piece else lines.end())
            if not piece:
                self._close(key)
        return bool(ready)

    def _close(self, key: selectors.SelectorKey) -> None:
        self._streams.unregister(key.fileobj)
        key.fileobj.close()  # pyright: ignore[reportAttributeAccessIssue]  # a pipe

    def _print(self, number: int, lines: bytes) -> None:
        """Writes `lines` to output `number`; if nobody reads it any more, the run continues without it."""
        try:
            for line in lines.splitlines(keepends=True):
                self._outputs[number].write(self._erase[number] + line)
            self._outputs[number].flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)

    def _say(self, text: str) -> None:
        self._print(2, f"jaxpipe.launch: {text}\n".encode())


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    """Kills `child` and the processes that it started."""
    with suppress(ProcessLookupError, PermissionError):  # all have ended; on macOS: only zombies remain
        os.killpg(child.pid, signal.SIGKILL)


def _in_words(processes: Collection[int]) -> str:
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


def _exit_code(code: int) -> int:
    """The exit code as a shell reports it: 128 + n for a process ended by signal n."""
    return code if code >= 0 else 128 - code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


# ---- Output lines. A progress bar ends its lines with a carriage return, so that the next one overwrites it; they
# stay such lines.

# After a line's end. A carriage return at the end of the input may still be followed by a newline.
_ENDS = re.compile(rb"(?<=\n)|(?<=\r)(?=[^\n])")


class Lines:
    """Assembles the output lines of one stream of one process from pieces that end anywhere."""

    def __init__(self, process: int):
        """Prefixes lines with the number `process`."""
        self._prefix = f"[{process}] ".encode()
        self._rest = b""
        self._shown = b""

    def feed(self, piece: bytes) -> bytes:
        """The lines that `piece` completes, and the newest state of a progress bar."""
        *whole, self._rest = _ENDS.split(self._rest + piece)
        lines = [line for line in whole if line.strip() or line.endswith(b"\n")]
        if lines and lines[0] == self._shown:
            del lines[0]
        if whole:
            self._shown = b""
        # A bar writes its carriage return before the text, not after it; waiting for it would delay the text by one.
        if whole and whole[-1].endswith(b"\r") and self._rest.strip():
            self._shown = self._rest.rstrip(b"\r") + b"\r"
            lines.append(self._shown)
        return b"".join(self._prefix + line for line in lines)

    def end(self) -> bytes:
        """The last line, if the stream ends without a newline."""
        rest = self._rest.rstrip(b"\r")
        self._rest = b""
        return self._prefix + rest + b"\n" if rest.strip() else b""


# ---- Orphans. On Linux a process ends with the one that started it, even one ended by SIGKILL (prctl(2),
# PR_SET_PDEATHSIG); elsewhere a killed launcher leaves its processes behind.

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_parent() -> Callable[[], None] | None:
    """A function for `preexec_fn` that ends the new process when its parent ends; None where the system has none.

    The signal arrives when the thread that started the process ends, so start processes from a thread that lives as
    long as its process. As with every fork, no other thread may run then.
    """
    if sys.platform != "linux":
        return None
    # Looked up here, since a forked process should do little.
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def call() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
        if os.getppid() != parent:  # the parent has ended meanwhile, and no signal will come
            os._exit(1)

    return call
