"""Paths that users give, in flags, configs and arguments: what becomes of their text is decided here alone."""

from __future__ import annotations

import re
from pathlib import Path

from jaxpipe.errors import ConfigError, explain


def local_path(name: str) -> Path:
    """The path that `name` means on this machine, with `~` expanded.

    Raises:
        ConfigError: `name` is an address, as gs://bucket/run, whose Path would be a folder `gs:`; or a home is unknown.

    Example:
        >>> local_path("/data/run")
        PosixPath('/data/run')
    """
    address = re.match(r"([A-Za-z][\w+.-]*://)(.*)", name)
    if address:
        scheme, rest = address.groups()
        is_here = scheme.lower() == "file://" and rest.startswith("/")
        raise ConfigError(
            explain(
                f"{name!r} is an address, not a path",
                rule=f"local-path: files are read and written in folders of this machine, not at {scheme}",
                repair=f"write {rest}" if is_here else "mount it and name the folder, or name a path of this machine",
            )
        )
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            explain(
                f"{name!r} is not a path: {error}",
                rule="local-path: ~ is the home of the user who runs the command, ~NAME that of a user of this machine",
                repair="write the path in full",
            )
        ) from error
