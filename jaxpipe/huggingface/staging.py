"""A folder that comes into being whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxpipe.errors import ConfigError


def check_target(path: Path, *, flag: str) -> None:
    """Raises ConfigError where `path` is anything else than nothing or an empty folder.

    Args:
        flag: that named it, as it was given.
    """
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        there = ", ".join(sorted(one.name for one in path.iterdir())[:5]) if path.is_dir() else "a file"
        raise ConfigError(
            f"{flag} is there already\n"
            "  rule convert-target: nothing is written over\n"
            f"      there: {there}\n"
            "  repair: name a folder that does not exist, or an empty one"
        )


@contextmanager
def staged(target: Path, *, flag: str) -> Iterator[Path]:
    """A folder beside `target` to write to, which becomes `target` at the end, and vanishes on an error.

    Args:
        flag: that named it, as it was given.

    Raises:
        ConfigError: `target` is there, or cannot be made or filled.
    """
    check_target(target, flag=flag)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise _not_written(flag, error) from error
    try:
        yield folder
        folder.chmod(0o777 & ~_umask())  # mkdtemp lets nobody else in
        folder.rename(target)
    except OSError as error:
        raise _not_written(flag, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _not_written(flag: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{flag} cannot be written\n"
        "  rule convert-target: the folder can be made, and has room for the model\n"
        f"      {error.filename or 'while writing'}: {error.strerror}\n"
        "  repair: name another folder, give yourself the right to write there, or make room"
    )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
