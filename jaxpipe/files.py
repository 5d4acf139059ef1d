"""Resolves paths that users give, and writes files whole or not at all.

Paths come in flags, configs and arguments; what becomes of their text is decided here alone. A file is written as
`NAME.partial` beside its place, forced to the disk and renamed, whatever ends the process that writes it. The partial
file of a killed process is overwritten by the next process that writes the same file. Errors of the system pass through
as OSError.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxpipe.errors import ConfigError

MOST_WHOLE_BYTES = 2**28  # of a config, a schedule, a tokenizer: the largest known have some tens of MiB
LONGEST_WRITE_S = 24 * 60 * 60.0  # for which processes that live wait for a checkpoint to be written


def local_path(name: str) -> Path:
    """The path that `name` means on this machine, with `~` expanded.

    Raises:
        ConfigError: `name` is an address, as gs://bucket/run, whose Path would be a folder `gs:`; a home is unknown; or
            it has a NUL, which Python's own functions refuse with a ValueError each.

    Example:
        >>> local_path("/data/run")
        PosixPath('/data/run')
    """
    address = re.match(r"([A-Za-z][\w+.-]*://)(.*)", name)
    if address:
        scheme, rest = address.groups()
        # A host behind file:// would name another machine's file.
        is_here = scheme.lower() == "file://" and rest.startswith("/")
        raise ConfigError(
            f"{name!r} is an address, not a path",
            rule=f"local-path: files are read and written in folders of this machine, not at {scheme}",
            repair=f"write {rest}" if is_here else "mount it and name the folder, or name a path of this machine",
        )
    if "\0" in name:
        raise ConfigError(
            f"{name!r} is not a path: it has a NUL character",
            rule="local-path: a path has any characters but NUL, which ends it for the system",
            repair="write the path without it",
        )
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{name!r} is not a path: {error}",
            rule="local-path: ~ is the home of the user who runs the command, ~NAME that of a user of this machine",
            repair="write the path in full",
        ) from error


def read_whole(path: Path, *, encoding: str = "utf-8", waits: bool = False) -> str:
    """The text of a file that is read at once, as a config; one that does not end, as /dev/zero, is refused.

    Args:
        waits: whether it may be a pipe, as `<(program)` of bash is, and is read when its writer writes.

    Raises:
        OSError: the file cannot be read, or is larger than any of its kind.
        UnicodeDecodeError: it is not a text, a ValueError.
    """
    # Opening a pipe waits for a writer, for ever if there is none.
    if not waits and path.is_fifo():
        raise OSError(errno.EINVAL, "it is a pipe, not a file", str(path))
    with path.open("rb") as file:
        # + 1: one byte more than allowed is enough to know.
        content = file.read(MOST_WHOLE_BYTES + 1)
    if len(content) > MOST_WHOLE_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MOST_WHOLE_BYTES // 2**20} MiB", str(path))
    return content.decode(encoding)


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes `content`, text as UTF-8, to `path`; if the process is killed meanwhile, the old file stays."""
    with whole_files([Path(path)]) as (file,):
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_files(paths: Sequence[Path]) -> Iterator[Sequence[BinaryIO]]:
    """Yields files to write to, which get the names `paths` at the end, in that order, and vanish on an error.

    The last file exists only if all do: an older version of it is removed before the first file is renamed.
    """
    partial = [path.with_name(f"{path.name}.partial") for path in paths]
    with ExitStack() as stack:
        # Also after success, when nothing has these names any more.
        stack.callback(lambda: [path.unlink(missing_ok=True) for path in partial])
        with ExitStack() as opened:
            files = [opened.enter_context(path.open("wb")) for path in partial]
            yield files
            for file in files:
                file.flush()
                # On the disk before the rename: after a power cut the name must not stand for an empty file.
                os.fsync(file.fileno())
        if len(paths) > 1:
            # Until the last rename readers see that the set is not complete.
            paths[-1].unlink(missing_ok=True)
        for written, path in zip(partial, paths, strict=True):
            written.replace(path)
        # A rename is on the disk when its folder is.
        sync_folder(paths[-1].parent)


def sync_folder(folder: Path) -> None:
    """Forces the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
