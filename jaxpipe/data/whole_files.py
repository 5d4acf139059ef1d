"""Files that appear under their names when all of them are whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxpipe.errors import DataError


@contextmanager
def whole_files(paths: Sequence[Path]) -> Iterator[Sequence[BinaryIO]]:
    """Files to write to, which get the names `paths` at the end, in that order, and vanish on an error.

    The last one is there only if all are, whatever happens: an older one is taken away before the first gets its
    name. Until then they are called `NAME.partial`; those that a killed run left are written over.

    Raises:
        DataError: one cannot be made or written, as when the disk is full.
    """
    partial = [path.with_name(f"{path.name}.partial") for path in paths]
    try:
        with ExitStack() as stack:
            stack.callback(lambda: [path.unlink(missing_ok=True) for path in partial])
            for path in paths:
                path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as opened:
                files = [opened.enter_context(path.open("wb")) for path in partial]
                yield files
                for file in files:
                    file.flush()
                    os.fsync(file.fileno())
            paths[-1].unlink(missing_ok=True)
            for path, target in zip(partial, paths, strict=True):
                path.replace(target)
            _sync_folder(paths[-1].parent)
    except OSError as error:
        raise DataError(
            f"{paths[0]} cannot be written\n"
            "  rule output-files: the folder can be made and written to, and has room for all files\n"
            f"      {error.filename or 'while writing'}: {error.strerror}\n"
            "  repair: make room, give yourself the right to write there, or name another place"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
