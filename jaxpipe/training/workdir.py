"""The files of a run: which there are, and that a new run never overwrites them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ml_collections import ConfigDict

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.config import base_config
from jaxpipe.config.unknown_field import unknown_field
from jaxpipe.errors import ConfigError

CONFIG, METRICS, SCHEDULE, TENSORBOARD = "config.json", "metrics.jsonl", "schedule.svg", "tensorboard"


def path_of(workdir: str) -> Path:
    """The absolute path of a working folder, as it is named on the command line or in a config."""
    return Path(workdir).expanduser().absolute()


def check(workdir: str) -> Path:
    """Where a run is or will be; makes nothing.

    Raises:
        ConfigError: a file stands there, or files of a run without its config, or nothing can be written there.
    """
    path = path_of(workdir)
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise ConfigError(
            f"--workdir={workdir}: {there} is a file\n"
            "  rule workdir-folder: the files of a run go into a folder\n"
            "  repair: name another --workdir"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise _not_writable(workdir, f"{there}: no permission to write")
    found = [name for name in (METRICS, TENSORBOARD, CHECKPOINTS) if (path / name).exists()]
    if found and not holds_run(path):
        raise ConfigError(
            f"--workdir={workdir} holds a part of a run\n"
            f"  rule workdir-run: a run goes on from its folder with {CONFIG} in it, and never overwrites another\n"
            f"      there: {', '.join(found)}; not there: {CONFIG}\n"
            "  repair: name another --workdir, or move these away"
        )
    return path


def holds_run(path: Path) -> bool:
    """Whether a run has begun in the folder."""
    return (path / CONFIG).is_file()


@contextmanager
def writing(workdir: str) -> Iterator[None]:
    """Around what writes the files of a run.

    Raises:
        ConfigError: in place of an OSError: no room, no permission.
    """
    try:
        yield
    except OSError as error:
        raise _not_writable(workdir, f"{error.filename or workdir}: {error.strerror}") from error


def write_config(path: Path, config: ConfigDict) -> None:
    """Writes `config` as JSON, in one piece: a process that is killed meanwhile leaves the old one."""
    written = path / f"{CONFIG}.partial"
    written.write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    written.replace(path / CONFIG)


def read_config(workdir: str) -> ConfigDict:
    """The config of the run in `workdir`, locked.

    Raises:
        ConfigError: no run there, or a config with other fields than this version has.
    """
    path = path_of(workdir) / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"--workdir={workdir} holds no run\n"
            f"  rule workdir-run: a run leaves {CONFIG} in its folder\n"
            f"      no file {path}\n"
            "  repair: name the --workdir that was given to jaxpipe.train"
        )
    repair = "use the version of jaxpipe that wrote it, or mend the file"
    try:
        saved = json.loads(path.read_text())
        config = base_config(saved["model"]["family"])
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {str(error).splitlines()[0]}\n"
            "  rule config-file: JSON with the fields of a config, a known model.family among them\n"
            f"  repair: {repair}"
        ) from error
    try:
        config.update(saved)
    except (AttributeError, KeyError, TypeError) as error:
        raise unknown_field(error, where=str(path), repair=repair) from error
    return config


def _not_writable(workdir: str, why: str) -> ConfigError:
    return ConfigError(
        f"--workdir={workdir} cannot be written\n"
        "  rule workdir-writable: a run makes its folder, and its files there\n"
        f"      {why}\n"
        "  repair: name another --workdir, or give yourself the right to write there"
    )
