"""The files of a run: which there are, and that a new run never overwrites them."""

from __future__ import annotations

import json
from pathlib import Path

from ml_collections import ConfigDict

from jaxpipe.config import base_config
from jaxpipe.errors import ConfigError

CONFIG, METRICS, SCHEDULE, TENSORBOARD, CHECKPOINTS = (
    "config.json",
    "metrics.jsonl",
    "schedule.svg",
    "tensorboard",
    "checkpoints",
)


def create(workdir: str) -> Path:
    """The folder for a new run.

    Raises:
        ConfigError: a file stands there, or a run that would be overwritten.
    """
    path = Path(workdir).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(
            f"--workdir={workdir} is a file\n"
            "  rule workdir-folder: the files of a run go into a folder\n"
            "  repair: name another --workdir"
        )
    found = [name for name in (CONFIG, METRICS, SCHEDULE, TENSORBOARD, CHECKPOINTS) if (path / name).exists()]
    if found:
        raise ConfigError(
            f"--workdir={workdir} holds a run\n"
            "  rule workdir-new: a run never overwrites another\n"
            f"      there: {', '.join(found)}\n"
            "  repair: name another --workdir, or move these away"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_config(path: Path, config: ConfigDict) -> None:
    """Writes `config` as JSON."""
    (path / CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def read_config(workdir: str) -> ConfigDict:
    """The config of the run in `workdir`, locked.

    Raises:
        ConfigError: no run there, or a config with other fields than this version has.
    """
    path = Path(workdir).expanduser() / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"--workdir={workdir} holds no run\n"
            f"  rule workdir-run: a run leaves {CONFIG} in its folder\n"
            f"      no file {path}\n"
            "  repair: name the --workdir that was given to jaxpipe.train"
        )
    config = base_config()
    try:
        config.update(json.loads(path.read_text()))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}\n"
            "  rule config-fields: its fields are those of jaxpipe.config.base_config()\n"
            "  repair: use the version of jaxpipe that wrote it, or mend the file"
        ) from error
    return config
