"""Which files and folders stand for the checkpoints of a run; nothing here needs JAX.

checkpoints/40/              of step 40, complete: it got this name when the last of its files was written
checkpoints/40/about.json    its step and time, the config, the held-out loss
checkpoints/40/SHA256SUMS    of its other files
checkpoints/60.orbax-...     being written, or left by a process that was killed
checkpoints/40.damaged       set aside, since the run had to start again from an earlier one
checkpoints/20.deleted       being deleted, or left where that was not possible
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CHECKPOINTS, ABOUT = "checkpoints", "about.json"
# Orbax writes it last, into a folder that is otherwise complete; it says no more than the folder's name.
COMMITTED = "commit_success.txt"
_UNFINISHED, _DELETED = ".orbax-checkpoint-tmp", "deleted"


@dataclass(frozen=True)
class About:
    """What stands beside the arrays.

    Attributes:
        step: of the checkpoint.
        written: when, ISO 8601.
        config: of the run, as it was then; empty where there was none.
        heldout_loss: the last one before it, or None.
    """

    step: int
    written: str
    config: dict[str, Any]
    heldout_loss: float | None

    def write(self, folder: Path) -> None:
        """Writes it into the folder of a step."""
        (folder / ABOUT).write_text(json.dumps(asdict(self), indent=2) + "\n")


def read_about(folder: Path) -> About | None:
    """Of the checkpoint in the folder of a step; None where it cannot be read."""
    try:
        return About(**json.loads((folder / ABOUT).read_text()))
    except (OSError, TypeError, ValueError):
        return None


def heldout_losses(folder: Path) -> dict[int, float | None]:
    """The held-out loss, where there is one, of every complete checkpoint in `folder`, by step."""
    found = {step: read_about(folder / str(step)) for step in complete_steps(folder)}
    return {step: about.heldout_loss if about else None for step, about in found.items()}


def complete_steps(folder: Path) -> list[int]:
    """Steps whose checkpoints are complete, ascending; whether they are undamaged only their sums say."""
    if not folder.is_dir():
        return []
    # One that vanishes meanwhile counts, lest there seem to be none: the one for which it was deleted may not be seen.
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal() and not path.is_file())


def unfinished(folder: Path) -> list[Path]:
    """What killed processes left: half-written checkpoints, and half-deleted ones."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _UNFINISHED in path.name or f".{_DELETED}" in path.name)


def set_aside_paths(folder: Path) -> list[Path]:
    """Checkpoints that were set aside."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if ".damaged" in path.name or ".replaced" in path.name)


def unfinished_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is written before it gets its name."""
    return folder / f"{step}{_UNFINISHED}"


def set_aside(folder: Path, step: int, why: str) -> Path:
    """Gives the checkpoint of `step` another name, with `why` in it, as "damaged"; returns where it now is."""
    number, path = 1, folder / f"{step}.{why}"
    while path.exists():
        number += 1
        path = folder / f"{step}.{why}.{number}"
    return (folder / str(step)).rename(path)


def delete(folder: Path, step: int) -> None:
    """Deletes the checkpoint of `step`, which is complete until it is no checkpoint any more.

    What cannot be deleted now, on NFS a file that another process reads, is left to the next start of the run.
    """
    with suppress(OSError):
        shutil.rmtree(set_aside(folder, step, _DELETED), ignore_errors=True)


def num_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; those that vanish meanwhile count as none."""
    total = 0
    for path in paths_of_files(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def paths_of_files(folder: Path) -> list[Path]:
    """All files in a folder and in those below it, as far as they do not vanish meanwhile."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
