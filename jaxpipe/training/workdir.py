"""The files of a run: which there are, and that a new run never overwrites them."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ml_collections import ConfigDict

from jaxpipe.config import base_config
from jaxpipe.config.unknown_field import unknown_field
from jaxpipe.errors import ConfigError

CONFIG, METRICS, SCHEDULE, TENSORBOARD, CHECKPOINTS = (
    "config.json",
    "metrics.jsonl",
    "schedule.svg",
    "tensorboard",
    "checkpoints",
)


def path_of(workdir: str) -> Path:
    """The absolute path of a working folder, as it is named on the command line or in a config."""
    return Path(workdir).expanduser().absolute()


def check_new(workdir: str) -> Path:
    """Where the folder of a new run will be; makes nothing.

    Raises:
        ConfigError: a file stands there, a run that would be overwritten, or nothing can be written there.
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
    found = [name for name in (CONFIG, METRICS, SCHEDULE, TENSORBOARD, CHECKPOINTS) if (path / name).exists()]
    if found:
        raise ConfigError(
            f"--workdir={workdir} holds a run\n"
            "  rule workdir-new: a run never overwrites another\n"
            f"      there: {', '.join(found)}\n"
            "  repair: name another --workdir, or move these away"
        )
    return path


def create(workdir: str) -> Path:
    """Makes the folder for a new run.

    Raises:
        ConfigError: as `check_new`, or the folder cannot be made.
    """
    path = check_new(workdir)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(workdir, f"{error.filename}: {error.strerror}") from error
    return path


def write_config(path: Path, config: ConfigDict) -> None:
    """Writes `config` as JSON."""
    (path / CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")


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
