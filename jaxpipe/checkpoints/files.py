"""The files and folders of a run's checkpoints, and which checkpoints are kept; needs no JAX.

checkpoints/40/              the checkpoint of step 40; it gets this name when the last of its files is written
checkpoints/40/about.json    step, time, config and held-out loss
checkpoints/40/SHA256SUMS    sums of its other files
checkpoints/60.orbax-...     being written, or left by a killed process
checkpoints/40.damaged       set aside because it is damaged; the run was resumed from an earlier one
checkpoints/20.deleted       being deleted, or left because that was not possible
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxpipe.files import read_whole, sync_folder, write_whole

CHECKPOINTS = "checkpoints"
ABOUT = "about.json"
# Orbax writes this file last, into a folder that is otherwise complete; it says no more than the folder's name.
COMMITTED = "commit_success.txt"
_UNFINISHED = ".orbax-checkpoint-tmp"
_DELETED = "deleted"


@dataclass(frozen=True)
class About:
    """The contents of about.json."""

    step: int
    written: str  # time, ISO 8601
    config: dict[str, Any]  # of the run at that time; empty if there was none
    heldout_loss: float | None  # the last one before the checkpoint

    def write(self, folder: Path) -> None:
        """Writes about.json into the folder of a checkpoint."""
        write_whole(folder / ABOUT, json.dumps(asdict(self), indent=2) + "\n")


def read_about(folder: Path) -> About | None:
    """The about.json of the checkpoint in `folder`; None if it cannot be read."""
    # Also of a file of an older or newer version, whose fields differ: a table and a rule can do without.
    try:
        return About(**json.loads(read_whole(folder / ABOUT)))
    except (OSError, RecursionError, TypeError, ValueError):
        return None


def heldout_losses(folder: Path) -> dict[int, float | None]:
    """The held-out loss, or None, of every complete checkpoint in `folder`, by step."""
    abouts = {step: read_about(folder / str(step)) for step in complete_steps(folder)}
    return {step: about.heldout_loss if about else None for step, about in abouts.items()}


def complete_steps(folder: Path) -> list[int]:
    """Steps with complete checkpoints, ascending; only the checksums tell whether they are undamaged."""
    # A checkpoint that is deleted meanwhile counts: the newer one for which it was deleted may not be in this listing.
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and not path.is_file())


def unfinished(folder: Path) -> list[Path]:
    """Half-written and half-deleted checkpoints, left by killed processes."""
    return sorted([*folder.glob(f"*{_UNFINISHED}*"), *folder.glob(f"*.{_DELETED}*")])


def set_aside_paths(folder: Path) -> list[Path]:
    """Checkpoints that have been set aside."""
    return sorted([*folder.glob("*.damaged*"), *folder.glob("*.replaced*")])


def unfinished_path(folder: Path, step: int) -> Path:
    """The folder into which the checkpoint of `step` is written before it gets its name."""
    return folder / f"{step}{_UNFINISHED}"


def set_aside(folder: Path, step: int, why: str) -> Path:
    """Renames the checkpoint of `step` to a name with `why` in it, as "damaged"; returns its new path."""
    number = 1
    path = folder / f"{step}.{why}"
    while path.exists():
        # The same step may be damaged, or replaced, more than once.
        number += 1
        path = folder / f"{step}.{why}.{number}"
    return (folder / str(step)).rename(path)


def delete(folder: Path, step: int) -> None:
    """Deletes the checkpoint of `step`: first its name, then its files, so that it is never incomplete.

    Files that cannot be deleted now, as on NFS while another process reads them, are left to the next start of the run.
    """
    with suppress(OSError):
        sync_folder(folder)  # the newer ones' names are on the disk before this one vanishes
    with suppress(OSError):
        shutil.rmtree(set_aside(folder, step, _DELETED), ignore_errors=True)


def num_bytes(folder: Path) -> int:
    """Bytes of all files in a folder; files that are deleted meanwhile count 0."""
    total = 0
    for path in paths_of_files(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def paths_of_files(folder: Path) -> list[Path]:
    """All files in a folder and its subfolders, except those that are deleted meanwhile."""
    return [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]


# ---- Which checkpoints are kept


@dataclass(frozen=True)
class Keep:
    """The rule by which checkpoints are kept; the newest always is."""

    last: int = 3  # number of newest checkpoints
    every: int = 0  # steps between checkpoints that are kept forever; 0 keeps none
    best: int = 0  # number of checkpoints with the least held-out loss

    def reasons(self, losses: Mapping[int, float | None]) -> dict[int, list[str]]:
        """The reasons to keep each checkpoint, by step, given its held-out loss; one without may be deleted.

        Example:
            >>> Keep(last=1, every=20, best=1).reasons({10: 1.5, 20: 2.0, 30: None, 40: 1.75, 50: 2.5})
            {10: ['best 1'], 20: ['every 20'], 30: [], 40: ['every 20'], 50: ['last 1']}
        """
        steps = sorted(losses)
        # The newest stays in any case: deleting all would lose the run.
        last = max(self.last, 1)
        # NaN is less than nothing and more than nothing; it would be sorted anywhere.
        measured = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
        kept = {
            f"last {last}": steps[-last:],
            f"every {self.every}": [step for step in steps if self.every and step % self.every == 0],
            # Of equal losses the newer one.
            f"best {self.best}": sorted(measured, key=lambda step: (measured[step], -step))[: self.best],
        }
        return {step: [reason for reason, of_reason in kept.items() if step in of_reason] for step in steps}


# Sums: SHA256SUMS of a checkpoint, by which damage is found


SUMS = "SHA256SUMS"
_MOST_THREADS = 8
_BLOCK_BYTES = 2**20


def write_sums(folder: Path) -> None:
    """Writes the checksums of all files in `folder`, in several threads: hashing releases Python's lock."""
    names = _names(folder)
    # Hashing may not take more threads than cores: the devices' own threads compute meanwhile.
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(_MOST_THREADS, num_cores)) as pool:
        sums = list(pool.map(lambda name: _sum(folder / name), names))
    write_whole(folder / SUMS, "".join(f"{digest}  {name}\n" for digest, name in zip(sums, names, strict=True)))


def damages(folder: Path, *, share: int = 0, num_shares: int = 1) -> list[str]:
    """Finds damaged or missing files in `folder`: one text for each.

    Args:
        num_shares: number of shares that the files are divided into; each share checks that all files exist.
    """
    try:
        expected = _read(folder / SUMS)
    except FileNotFoundError:
        return [f"{SUMS}: no such file"]
    except (OSError, ValueError) as error:
        return [f"{SUMS}: cannot be read, {error}"]
    there = _names(folder)
    missing = [f"{name}: no such file" for name in sorted(expected.keys() - set(there))]
    added = [f"{name}: not in {SUMS}" for name in sorted(set(there) - expected.keys())]
    # A stride, so that the shares are about equally large: the names are sorted and big files stand together.
    names = sorted(expected.keys() & set(there))[share::num_shares]
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        wrong = pool.map(lambda name: _damage(folder, name, expected[name]), names)
        return missing + added + [damage for damage in wrong if damage]


def _damage(folder: Path, name: str, expected: str) -> str:
    try:
        actual = _sum(folder / name)
    except OSError as error:
        return f"{name}: cannot be read, {error.strerror}"
    return "" if actual == expected else f"{name}: sha256 {actual[:12]}..., {expected[:12]}... in {SUMS}"


def _sum(path: Path) -> str:
    if path.is_fifo():  # it would wait for ever for one that writes
        raise OSError(errno.EINVAL, "it is a pipe, not a file", str(path))
    digest = hashlib.sha256()
    # Without a buffer: blocks are read once and are large already.
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, str]:
    text = read_whole(path)
    lines = [line.split("  ", maxsplit=1) for line in text.splitlines()]
    # A file that was cut short ends within a line.
    if not text.endswith("\n") or any(len(line) != 2 or len(line[0]) != 64 for line in lines):
        raise ValueError("not lines of a sum, two spaces and a name")
    return {name: digest for digest, name in lines}


def _names(folder: Path) -> Sequence[str]:
    files = (path.relative_to(folder).as_posix() for path in paths_of_files(folder))
    # Orbax writes the one after the sums, and a file has no sum of itself.
    return sorted(name for name in files if name not in (SUMS, COMMITTED))
