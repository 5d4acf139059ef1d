"""That a run goes on with the tokens that it began with, and that all its processes read the same ones."""

from __future__ import annotations

from pathlib import Path

from jaxpipe.data import Fingerprint
from jaxpipe.data.fingerprint import differences
from jaxpipe.errors import ConfigError

DATA = "data.json"  # in the run's folder
MOST_SHOWN = 5


def write_fingerprint(path: Path, fingerprint: Fingerprint) -> None:
    """Writes it into the run's folder, in one piece: a process that is killed meanwhile leaves the old one."""
    written = path / f"{DATA}.partial"
    written.write_text(fingerprint.to_json() + "\n")
    written.replace(path / DATA)


def check_same_data(path: Path, fingerprint: Fingerprint) -> None:
    """Compares with what the run in `path` began with; a run of an older version, which has not written it, passes.

    Raises:
        ConfigError: the tokens are others, or what was written cannot be read.
    """
    if not (path / DATA).is_file():
        return
    try:
        before = Fingerprint.from_json((path / DATA).read_text())
    except (KeyError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path / DATA} cannot be read: {type(error).__name__}: {error}\n"
            "  rule data-file: JSON with the fingerprint of the tokens, as a run has written it\n"
            "  repair: mend the file, or move it away: data.files and data.tokenizer must then be as they were"
        ) from error
    if differ := _in_words(before, fingerprint, "before", "now"):
        raise ConfigError(
            f"data.files are other tokens than those that the run in --workdir={path} began with\n"
            "  rule same-data: a run goes on with its tokens, wherever they lie, since its position counts batches of"
            " them\n"
            f"{differ}"
            "  repair: put the files back as they were ('auto': run the same Python), or name another --workdir;"
            " checkpoint.init_from starts a new run from the parameters"
        )


def check_same_as_first(first: str, fingerprint: Fingerprint, *, process: int) -> None:
    """Compares with what process 0 reads.

    Args:
        first: `to_json` of the fingerprint of process 0.
        fingerprint: of this process.
        process: this one.

    Raises:
        ConfigError: the tokens are others.
    """
    if differ := _in_words(Fingerprint.from_json(first), fingerprint, "process 0", f"process {process}"):
        raise ConfigError(
            f"data.files: process {process} reads other tokens than process 0\n"
            "  rule same-data: every process makes its rows of a batch from the same tokens\n"
            f"{differ}"
            "  repair: name files that all machines share, or copy those of process 0 ('auto': run the same Python"
            " everywhere)"
        )


def _in_words(one: Fingerprint, other: Fingerprint, name: str, other_name: str) -> str:
    """Lines that say what differs; none where nothing does."""
    differ, width = differences(one, other), max(len(name), len(other_name))
    lines = "".join(
        f"      {name:<{width}} {words}\n      {other_name:<{width}} {other_words}\n"
        for words, other_words in differ[:MOST_SHOWN]
    )
    more = len(differ) - MOST_SHOWN
    return lines + (f"      and {more} more\n" if more > 0 else "")
