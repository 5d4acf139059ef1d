"""The folder of a run: its files, which a new run never overwrites, and the lock that lets one run write at a time."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.config import base_config
from jaxpipe.config.base import RunConfig, unknown_field
from jaxpipe.errors import ConfigError, first_of
from jaxpipe.files import local_path, read_whole, write_whole
from jaxpipe.huggingface.source_model import copied_path, own_path
from jaxpipe.python_file import is_python_file

CONFIG = "config.json"
METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
SCHEDULE_PICTURE = "schedule.svg"
FAMILY = "family.py"  # the run's copy of a family's Python file
SCHEDULE = "schedule.json"
FLAGS = "xla_flags.txt"  # those that the run was compiled with last, a line each
LOCK = "lock"  # the first file of a run
UNUSABLE = ("[", "**", "\\")  # in the path of a run: Orbax does not find what it wrote there, or writes elsewhere


def path_of(workdir: str) -> Path:
    """The absolute path of a run's folder, given as on the command line or in a config."""
    return local_path(workdir).absolute()


def check(workdir: str) -> Path:
    """Returns the path of a run's folder if it can hold this run; creates nothing.

    Raises:
        ConfigError: a file has this name, the folder has files of a run without its config or of no run, or is not
            writable.
    """
    path = path_of(workdir)
    check_name(path, flag=f"--workdir={workdir}")
    # The folder may not exist yet; the nearest parent that does decides whether it can be made.
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not there.is_dir():
        raise ConfigError(
            f"--workdir={workdir}: {there} is a file",
            rule="workdir-folder: the files of a run go into a folder",
            repair="name another --workdir",
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise _not_writable(workdir, f"{there}: no permission to write")
    # Hidden files do not count: file managers and network disks leave some in every folder.
    names = sorted(file.name for file in path.glob("[!.]*"))
    if not names or holds_run(path):
        return path
    of_run = [name for name in (METRICS, TENSORBOARD, CHECKPOINTS) if name in names]
    if of_run:
        raise ConfigError(
            f"--workdir={workdir} holds an incomplete run",
            rule=f"workdir-run: a run is resumed from a folder with its {CONFIG}, and never overwrites another run",
            picture=f"there: {', '.join(of_run)}; not there: {CONFIG}",
            repair="name another --workdir, or move these away",
        )
    # A run that failed before its config was written leaves its lock, and perhaps more; the next may begin there.
    if LOCK not in names:
        raise ConfigError(
            f"--workdir={workdir} has files, and holds no run",
            rule=f"workdir-new: a new run begins in a folder without files; it resumes in one with its {CONFIG}",
            picture=f"there: {first_of(names, joined_by=', ')}",
            repair=f"name another --workdir, as {path / 'run'}",
        )
    return path


def check_name(path: Path, *, flag: str) -> None:
    """Raises ConfigError for a folder in which no checkpoint could be written and read again."""
    if unusable := [characters for characters in UNUSABLE if characters in str(path)]:
        raise ConfigError(
            f"{flag}: the path of the folder has {unusable[0]}",
            rule=f"run-name: without {' '.join(UNUSABLE)}, which the library that writes checkpoints takes for a"
            " pattern or for another folder",
            picture=str(path),
            repair="name another folder",
        )


def holds_run(path: Path) -> bool:
    """Whether a run has begun in the folder."""
    return (path / CONFIG).is_file()


@contextmanager
def writing(workdir: str) -> Iterator[None]:
    """A context for writing files of a run: turns an OSError (no room, no permission) into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise _not_writable(workdir, f"{error.filename or workdir}: {error.strerror}") from error


def write_config(path: Path, config: RunConfig) -> None:
    """Writes `config` as JSON into the run's folder, whole, and keeps the Python file of its family.

    The path of a file in its hf/ begins there.
    """
    saved = config.to_dict()
    if is_python_file(config.model.family):
        file = local_path(config.model.family.partition(":")[0])
        # A resumed run may name the copy itself, which must not be written from itself.
        if file.resolve() != (path / FAMILY).resolve():
            write_whole(path / FAMILY, file.read_bytes())
    if "tokenizer" in saved["data"]:
        # Relative to the run, so that its folder can be moved.
        saved["data"]["tokenizer"] = copied_path(config.data.tokenizer, path, Path())
    write_whole(path / CONFIG, json.dumps(saved, indent=2) + "\n")


def read_config(workdir: str, *, allow_code: bool | None = None) -> ConfigDict:
    """The config of the run in `workdir`, locked; a method's Python file in it gives way to the run's schedule.json.

    Args:
        allow_code: as of `read_written`; True lets the method's file be.

    Raises:
        ConfigError: as `read_written`.
    """
    config = read_written(workdir, allow_code=allow_code)
    if is_python_file(config.pipeline.schedule) and not allow_code:
        # schedule.json is data with the same actions; the method's file would be code of whoever wrote config.json.
        config.pipeline.update(schedule=str(path_of(workdir) / SCHEDULE), options="")
    return config


def read_written(workdir: str, *, allow_code: bool | None = None) -> ConfigDict:
    """The config of the run in `workdir` as it stands there, locked.

    A config.json is data, which people take from others; only its family decides its fields, so it alone is run here.

    Args:
        allow_code: whether the family's Python file may be run: True, the one that config.json names; None, the copy
            that the run keeps; False, neither.

    Raises:
        ConfigError: the folder holds no run, its config has other fields than this version, or it names a Python file
            that may not be run.
    """
    saved = load(workdir)
    family = saved["model"]["family"]
    if is_python_file(family) and not allow_code:
        kept = kept_family(path_of(workdir), family)
        # `is False`: None, the default, still allows the run's own copy.
        if allow_code is False or kept is None:
            raise refused_code(workdir, f"model.family={family!r}")
        family = kept
    return config_from(workdir, saved, family=family)


def kept_family(path: Path, family: str) -> str | None:
    """The name of the copy of the Python file `family` that the run in `path` keeps; None if there is none."""
    file = path / FAMILY
    _, colon, name = family.partition(":")
    # A link could lead to a file that the run has not copied.
    return f"{file}{colon}{name}" if file.is_file() and not file.is_symlink() else None


def refused_code(workdir: str, named: str) -> ConfigError:
    """The error for a Python file that the config.json of a run names, and that nobody has allowed to run."""
    return ConfigError(
        f"{path_of(workdir) / CONFIG} names a Python file: {named}",
        rule=f"run-code: of what a run's {CONFIG} names, only its own copy of its family, {FAMILY}, is run unasked",
        repair=(
            f"read that file; then give --allow_code to eval or sample, or copy a family to {workdir}/{FAMILY}, or"
            " name a method with --method"
        ),
    )


def load(workdir: str) -> dict[str, Any]:
    """The values in config.json of the run in `workdir`: sections of fields, model.family among them; runs nothing.

    Raises:
        ConfigError: the folder holds no run, or the file is no JSON of this form.
    """
    path = path_of(workdir) / CONFIG
    if not path.is_file():
        raise ConfigError(
            f"--workdir={workdir} holds no run",
            rule=f"workdir-run: a run leaves {CONFIG} in its folder",
            picture=f"no file {path}",
            repair="name the --workdir that was given to jaxpipe.train",
        )
    try:
        saved = json.loads(read_whole(path))
        # A ConfigDict takes null for any field, and would lose its type by it.
        empty = [f"{section}.{name}" for section, values in saved.items() for name in values if values[name] is None]
        if empty:
            raise ValueError(f"{empty[0]} is null")
        if not isinstance(saved["model"]["family"], str):
            raise TypeError("model.family is not a text")
        return saved
    except (AttributeError, KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from error


def config_from(workdir: str, saved: dict[str, Any], *, family: str) -> ConfigDict:
    """The config of the values `saved` of the run in `workdir`, with `family` as its model.family, which is run."""
    path = path_of(workdir) / CONFIG
    try:
        config = base_config(family)
    except ConfigError as error:
        raise _unreadable(path, error) from error
    # `saved` names the family as it was told; here the copy may take its place.
    values = saved | {"model": saved["model"] | {"family": family}}
    try:
        if tokenizer := saved.get("data", {}).get("tokenizer"):
            values["data"] = saved["data"] | {"tokenizer": own_path(tokenizer, path.parent)}
        config.update(values)
    except (AttributeError, KeyError, TypeError) as error:
        raise unknown_field(error, where=str(path), repair=_REPAIR) from error
    return config


_REPAIR = "use the version of jaxpipe that wrote it, or correct the file"


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {str(error).splitlines()[0]}",
        rule="config-file: JSON with the fields of a config, a known model.family among them",
        repair=_REPAIR,
    )


def _not_writable(workdir: str, why: str) -> ConfigError:
    return ConfigError(
        f"--workdir={workdir} cannot be written",
        rule="workdir-writable: a run creates its folder and writes its files there",
        picture=why,
        repair="name another --workdir, or give yourself the right to write there",
    )


# ---- The lock


@contextmanager
def run_lock(workdir: str, *, is_first: bool, broadcast: Callable[[str, str], str]) -> Iterator[None]:
    """Creates the folder of a run if needed, and locks it for the processes of this run.

    Process 0 locks a file in the folder; the system unlocks it when the process ends, for whatever reason. The other
    processes compare what process 0 wrote there with what they see.

    Args:
        is_first: whether this is process 0.
        broadcast: (name, text) -> the text of process 0.

    Raises:
        ConfigError: `check` raises it, the folder cannot be created, another run has locked it, or the processes see
            different folders.
    """
    path = check(workdir)
    with writing(workdir):
        path.mkdir(parents=True, exist_ok=True)
        # Not "w": opening must not empty the file while another run has locked it. The other processes only read.
        file = (path / LOCK).open("a+" if is_first else "ab+")
    with file:
        if is_first:
            _lock(file, workdir)
            # Only now, with the lock taken: before, the content was that of another run.
            file.truncate(0)
            file.write(f"host {socket.gethostname()}, pid {os.getpid()}, {uuid.uuid4()}\n")
            file.flush()
            os.fsync(file.fileno())  # for processes on other machines
        owner = broadcast("claimed", (path / LOCK).read_text() if is_first else "")
        if (path / LOCK).read_text() != owner:
            raise ConfigError(
                f"--workdir={workdir} is not the same folder for all processes",
                rule="workdir-shared: all machines of a run see one folder, for the parts of its checkpoints",
                picture=(
                    f"process 0: {owner.strip()} in {LOCK}; here: {(path / LOCK).read_text().strip() or 'nothing'}"
                ),
                repair="name a folder on a file system that all machines share",
            )
        yield


def _lock(file: Any, workdir: str) -> None:
    try:
        # Without waiting: two runs in one folder are a mistake, and nobody would see why the second stands still.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.seek(0)
        raise ConfigError(
            f"--workdir={workdir}: another run writes there",
            rule="workdir-alone: one run writes into a folder",
            picture=file.read().strip(),
            repair="wait for its end, end it, or name another --workdir",
        ) from error
    except OSError:
        pass  # a file system without locks
