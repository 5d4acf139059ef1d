"""The files that `data.files` names: text by a glob or "auto", or prepared files after "indexed:", with weights."""

from __future__ import annotations

import glob
import sysconfig
from fractions import Fraction
from pathlib import Path

from jaxpipe.errors import ConfigError
from jaxpipe.files import local_path

AUTO = "auto"
INDEXED = "indexed:"
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def text_files(files: str) -> list[Path]:
    """Returns the text files that a glob or "auto" names, in order of their paths; ConfigError if there is none."""
    return _standard_library() if files == AUTO else _matching(files)


def read_text_file(path: Path, files: str) -> bytes:
    """Returns the bytes of `path`, one of the files that `files` names; ConfigError if the file cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.files={files!r} names a file that cannot be read",
            rule="files-readable: every file that the glob names is read whole",
            picture=f"{path}: {error.strerror}",
            repair="make it readable, or name other files",
        ) from error


def parse_blend(files: str) -> dict[str, Fraction]:
    """Returns the weight of each prefix of prepared files; weights need not add up to 1.

    Args:
        files: "indexed:PREFIX", or "indexed:WEIGHT PREFIX WEIGHT PREFIX ..." as Megatron-LM's --data-path.

    Raises:
        ConfigError: `files` has neither form, a weight is not positive, or a prefix occurs twice.

    Example:
        >>> parse_blend("indexed:0.7 wiki 0.3 books")
        {'wiki': Fraction(7, 10), 'books': Fraction(3, 10)}
    """
    words = files.removeprefix(INDEXED).split()
    if len(words) == 1:
        words = ["1", *words]
    weights = [_weight(word) for word in words[::2]]
    prefixes = words[1::2]
    if not words or len(weights) != len(prefixes):
        raise _not_a_blend(files, f"{len(words)} words")
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None or weight <= 0:
            raise _not_a_blend(files, f"{word!r} is not a positive number")
    for prefix in prefixes:
        if prefixes.count(prefix) > 1:
            raise _not_a_blend(files, f"{prefix} occurs {prefixes.count(prefix)} times")
    return {prefix: weight for prefix, weight in zip(prefixes, weights, strict=True) if weight}


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in relative if not NOT_STANDARD_LIBRARY.intersection(path.parts)]
    if not kept:
        raise ConfigError(
            f"data.files='auto' finds no *.py under {root}",
            rule="standard-library: 'auto' reads the source text of the Python that runs",
            picture=str(root),
            repair="set data.files to a glob of text files",
        )
    return [root / path for path in sorted(kept, key=Path.as_posix)]


def _matching(pattern: str) -> list[Path]:
    if local_path(pattern).is_file():  # whatever its name means as a glob
        return [local_path(pattern)]
    matches = glob.glob(str(local_path(pattern)), recursive=True)
    paths = sorted(path for path in map(Path, matches) if path.is_file())
    if not paths:
        raise ConfigError(
            f"data.files={pattern!r} matches no file",
            rule="files-exist: the glob names at least one file; ** descends into folders",
            picture=f"current folder: {Path.cwd()}",
            repair="name files that exist, in quotes so that the shell does not expand the glob,"
            " or 'auto' for the Python standard library",
        )
    return paths


def _weight(word: str) -> Fraction | None:
    """The exact number that `word` spells; None if it spells none."""
    try:
        # Exact: shares of a blend are compared and summed as fractions.
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def _not_a_blend(files: str, found: str) -> ConfigError:
    return ConfigError(
        f"data.files={files!r} does not name prepared files",
        rule="blend: one prefix, or a positive weight before each of several different prefixes",
        picture=f"{INDEXED}PREFIX or {INDEXED}0.7 PREFIX 0.3 PREFIX; found: {found}",
        repair="write one of these forms; a prefix is the path of a .bin and .idx without these endings,"
        " and contains no spaces",
    )
