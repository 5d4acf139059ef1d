"""SHA256SUMS in the folder of a checkpoint: a line for every file, in the format of `sha256sum -c`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxpipe.checkpoints.files import COMMITTED, paths_of_files

SUMS = "SHA256SUMS"
_MOST_THREADS = 8
_BLOCK_BYTES = 2**20


def write_sums(folder: Path, *, num_threads: int = _MOST_THREADS) -> None:
    """Writes the checksums of all files in `folder`, in several threads: hashing releases Python's lock."""
    names = _names(folder)
    with ThreadPoolExecutor(min(num_threads, _num_cores())) as pool:
        sums = list(pool.map(lambda name: _sum(folder / name), names))
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for digest, name in zip(sums, names, strict=True)))


def damages(folder: Path, *, share: int = 0, num_shares: int = 1) -> list[str]:
    """Finds damaged or missing files in `folder`: one text for each.

    Args:
        folder: folder of a complete checkpoint.
        share: index of the share to check.
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
    names = sorted(expected.keys() & set(there))[share::num_shares]
    with ThreadPoolExecutor(_MOST_THREADS) as pool:
        wrong = pool.map(lambda name: _damage(folder, name, expected[name]), names)
        return missing + added + [damage for damage in wrong if damage]


def _num_cores() -> int:
    """The number of cores that this process may use, as far as the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _damage(folder: Path, name: str, expected: str) -> str:
    try:
        found = _sum(folder / name)
    except OSError as error:
        return f"{name}: cannot be read, {error.strerror}"
    return "" if found == expected else f"{name}: sha256 {found[:12]}..., {expected[:12]}... in {SUMS}"


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, str]:
    text = path.read_text()
    lines = [line.split("  ", maxsplit=1) for line in text.splitlines()]
    if not text.endswith("\n") or any(len(line) != 2 or len(line[0]) != 64 for line in lines):
        raise ValueError("not lines of a sum, two spaces and a name")
    return {name: digest for digest, name in lines}


def _names(folder: Path) -> Sequence[str]:
    files = (path.relative_to(folder).as_posix() for path in paths_of_files(folder))
    return sorted(name for name in files if name not in (SUMS, COMMITTED))
