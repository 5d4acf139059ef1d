"""Which text files `data.files` names, and their bytes."""

from __future__ import annotations

import glob
import sysconfig
from pathlib import Path

from jaxpipe.errors import ConfigError

AUTO = "auto"
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def text_files(files: str) -> list[Path]:
    """The files, in order of their paths.

    Args:
        files: a glob (`**` descends), or "auto" for the Python standard library without its tests.

    Raises:
        ConfigError: there is none.
    """
    return _standard_library() if files == AUTO else _matching(files)


def read_text_file(path: Path, files: str) -> bytes:
    """The bytes of `path`, one of those that `files` names.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"data.files={files!r} names a file that cannot be read\n"
            "  rule files-readable: every file that the glob names is read whole\n"
            f"      {path}: {error.strerror}\n"
            "  repair: make it readable, or name other files"
        ) from error


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = [path for path in relative if not NOT_STANDARD_LIBRARY.intersection(path.parts)]
    if not kept:
        raise ConfigError(
            f"data.files='auto' finds no *.py under {root}\n"
            "  rule standard-library: 'auto' reads the source text of the Python that runs\n"
            f"      {root}\n"
            "  repair: set data.files to a glob of text files"
        )
    return [root / path for path in sorted(kept, key=Path.as_posix)]


def _matching(pattern: str) -> list[Path]:
    found = glob.glob(str(Path(pattern).expanduser()), recursive=True)
    paths = sorted(path for path in map(Path, found) if path.is_file())
    if not paths:
        raise ConfigError(
            f"data.files={pattern!r} matches no file\n"
            "  rule files-exist: the glob names at least one file; ** descends into folders\n"
            f"      looked from {Path.cwd()}\n"
            "  repair: name files that exist, in quotes so that the shell leaves the glob alone,"
            " or 'auto' for the Python standard library"
        )
    return paths
