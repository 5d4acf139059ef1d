"""The folder of a run is held by one run at a time, and is the same one for all its processes."""

from __future__ import annotations

import fcntl
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.training import workdir as files

LOCK = "lock"


@contextmanager
def claimed(workdir: str, *, is_first: bool, agree: Callable[[str, str], str]) -> Iterator[None]:
    """Makes the folder of a run, if it is not there, and holds it for the processes of this run alone.

    Process 0 locks a file in it, which the end of the process, however it comes, unlocks; the others look whether what
    it wrote there is what they see.

    Args:
        workdir: of the run.
        is_first: whether this is process 0.
        agree: gives the others a text of process 0.

    Raises:
        ConfigError: as `check`, or the folder cannot be made, another run is at work in it, or it is not the same one
            for all processes.
    """
    path = files.check(workdir)
    with files.writing(workdir):
        path.mkdir(parents=True, exist_ok=True)
        file = (path / LOCK).open("a+" if is_first else "ab+")
    with file:
        if is_first:
            _lock(file, workdir)
            file.truncate(0)
            file.write(f"host {socket.gethostname()}, pid {os.getpid()}, {uuid.uuid4()}\n")
            file.flush()
            os.fsync(file.fileno())  # for those who read it on other machines
        owner = agree("claimed", (path / LOCK).read_text() if is_first else "")
        if (path / LOCK).read_text() != owner:
            raise ConfigError(
                f"--workdir={workdir} is not the same folder for all processes\n"
                "  rule workdir-shared: all machines of a run see one folder, for the parts of its checkpoints\n"
                f"      process 0: {owner.strip()} in {LOCK}; here: {(path / LOCK).read_text().strip() or 'nothing'}\n"
                "  repair: name a folder on a file system that all machines share"
            )
        yield


def _lock(file: Any, workdir: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise ConfigError(
            f"--workdir={workdir}: another run is at work there\n"
            "  rule workdir-alone: one run writes into a folder\n"
            f"      {file.read().strip()}\n"
            "  repair: wait for its end, or end it, or name another --workdir"
        ) from error
    except OSError:
        pass  # a file system without locks
