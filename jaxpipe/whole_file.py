"""Files that appear under their names complete or not at all, whatever ends the process that writes them.

A file is written as `NAME.partial` beside its place, forced to the disk and renamed. The partial file of a killed
process is overwritten by the next process that writes the same file. Errors of the system pass through as OSError.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Writes `content` to `path`; if the process is killed meanwhile, the old file stays.

    Args:
        path: path of the file; its folder exists.
        content: the new content; text is written as UTF-8.
    """
    with whole_files([Path(path)]) as (file,):
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_files(paths: Sequence[Path]) -> Iterator[Sequence[BinaryIO]]:
    """Yields files to write to, which get the names `paths` at the end, in that order, and vanish on an error.

    The last file exists only if all do: an older version of it is removed before the first file is renamed.
    """
    partial = [path.with_name(f"{path.name}.partial") for path in paths]
    with ExitStack() as stack:
        stack.callback(lambda: [path.unlink(missing_ok=True) for path in partial])
        with ExitStack() as opened:
            files = [opened.enter_context(path.open("wb")) for path in partial]
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        if len(paths) > 1:
            paths[-1].unlink(missing_ok=True)
        for written, path in zip(partial, paths, strict=True):
            written.replace(path)
        _sync_folder(paths[-1].parent)


def _sync_folder(folder: Path) -> None:
    """Forces the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
