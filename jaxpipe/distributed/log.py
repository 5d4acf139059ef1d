"""The output of a run: printed by process 0 alone, and written by every process into a file of its own."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = "logs"
LOGGER = logging.getLogger("jaxpipe")

_print: list[Callable[[str], None] | None] = [print]  # None prints nothing
_early: list[str] = []  # texts that were logged before the file existed


def file_of(path: Path, process: int) -> Path:
    """The log of `process` in a run's folder."""
    return path / FOLDER / f"process_{process:04}.log"


def has_terminal() -> bool:
    """Whether the standard error is a terminal, so that a progress bar may overwrite itself."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def logging_to(path: Path, *, process: int) -> Iterator[None]:
    """A context in which all that this process says, logs or warns of, also so far, goes into its file of the run."""
    file = file_of(path, process)
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    while _early:
        LOGGER.info("%s", _early.pop(0))
    show = warnings.showwarning

    def show_and_log(message, category, filename, lineno, file=None, line=None) -> None:
        LOGGER.info("warning: %s", message)
        show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_and_log
    try:
        yield
    finally:
        warnings.showwarning = show
        LOGGER.propagate = True
        LOGGER.removeHandler(handler)
        handler.close()


@contextmanager
def printing_with(write: Callable[[str], None]) -> Iterator[None]:
    """A context in which `say` prints with `write`, for example that of a progress bar."""
    before = _print[0]
    if before is not None:
        _print[0] = write
    try:
        yield
    finally:
        _print[0] = before


def only_log() -> None:
    """Makes `say` print nothing from now on."""
    _print[0] = None


def say(text: str) -> None:
    """Prints `text` in process 0 alone, and logs it in every process.

    A run outlives what reads its output: once that is closed, or its disk is full, the log alone has the text.
    """
    log(text)
    write = _print[0]
    if sys.stdout is None or write is None:  # the former: closed before Python started
        return
    try:
        write(text)
        sys.stdout.flush()
    except OSError as error:
        log(f"the standard output takes no more text: {error.strerror}")
        only_log()
        with suppress(OSError, ValueError):  # else Python fails at its end, when it writes what was left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def log(text: str) -> None:
    """Logs `text` without printing it."""
    if LOGGER.handlers:
        LOGGER.info("%s", text)
    else:
        _early.append(text)
