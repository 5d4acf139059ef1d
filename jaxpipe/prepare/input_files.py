"""Which files hold the text, and how."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxpipe.errors import ConfigError

COMPRESSED = ".gz"
LINES = (".jsonl", ".json")
FORMATS = ("auto", "text", "jsonl")


@dataclass(frozen=True)
class InputFile:
    """A file of text.

    Attributes:
        path: of the file.
        num_bytes: as it lies on the disk.
        is_lines: whether each line is a JSON object with a document; else the whole file is one document.
        is_compressed: whether gzip has packed it.
    """

    path: Path
    num_bytes: int
    is_lines: bool
    is_compressed: bool


def find_files(patterns: Sequence[str], *, form: str = "auto") -> list[InputFile]:
    """All files that `patterns` name, each once, in order of their paths.

    Args:
        patterns: files or globs; `**` descends.
        form: "text", "jsonl", or "auto": by the endings .jsonl and .json, before .gz where it is there.

    Raises:
        ConfigError: a pattern names no file.
    """
    paths = {path for pattern in patterns for path in _matching(pattern)}
    return [_input_file(path, form) for path in sorted(paths, key=Path.as_posix)]


def _input_file(path: Path, form: str) -> InputFile:
    is_compressed = path.suffix == COMPRESSED
    suffix = path.with_suffix("").suffix if is_compressed else path.suffix
    return InputFile(path, path.stat().st_size, form == "jsonl" or (form == "auto" and suffix in LINES), is_compressed)


def _matching(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    found = [path] if path.is_file() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = [one for one in found if one.is_file()]
    if not files:
        name = f"--input='{pattern.rstrip('/')}/**'" if path.is_dir() else "files that exist"
        raise ConfigError(
            f"--input={pattern} names no file\n"
            "  rule input-files: every --input is a file, or a glob of at least one; ** descends into folders\n"
            f"      looked from {Path.cwd()}\n"
            f"  repair: name {name}, a glob in quotes so that the shell leaves it alone"
        )
    return files
