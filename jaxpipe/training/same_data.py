"""Checks that a run reads the same tokens in all processes, and when it is resumed.

Goes in: fingerprints of the tokens. Comes out: nothing, or a ConfigError with every difference.
"""

from __future__ import annotations

from pathlib import Path

from jaxpipe.data import Fingerprint
from jaxpipe.data.fingerprint import differences
from jaxpipe.errors import ConfigError, first_of
from jaxpipe.files import read_whole, write_whole

DATA = "data.json"  # in the run's folder


def write_fingerprint(path: Path, fingerprint: Fingerprint) -> None:
    """Writes the fingerprint of the run's tokens into its folder, whole."""
    write_whole(path / DATA, fingerprint.to_json() + "\n")


def check_same_data(path: Path, fingerprint: Fingerprint) -> None:
    """Checks that the tokens are those with which the run in `path` began; an old run without a fingerprint passes.

    Raises:
        ConfigError: the tokens differ, or the run's fingerprint cannot be read.
    """
    if not (path / DATA).is_file():
        return
    try:
        before = Fingerprint.from_json(read_whole(path / DATA))
    except (KeyError, OSError, RecursionError, TypeError, ValueError) as error:
        # RecursionError: JSON of thousands of brackets, as of a damaged file.
        raise ConfigError(
            f"{path / DATA} cannot be read: {type(error).__name__}: {error}",
            rule="data-file: JSON with the fingerprint of the tokens, as a run has written it",
            repair="correct the file, or move it away: data.files and data.tokenizer must then be as they were",
        ) from error
    if differ := _listed_differences(before, fingerprint, "before", "now"):
        raise ConfigError(
            f"data.files are other tokens than those with which the run in --workdir={path} began",
            rule="same-data: a resumed run keeps its tokens (files may move), since its position counts batches",
            picture=differ,
            repair=(
                "put the files back as they were ('auto': run the same Python), or name another --workdir;"
                " checkpoint.init_from starts a new run from the parameters"
            ),
        )


def check_same_as_first(first: str, fingerprint: Fingerprint, *, process: int) -> None:
    """Checks that this process reads the same tokens as process 0.

    Args:
        first: fingerprint of process 0, from `to_json`.
        fingerprint: fingerprint of this process.

    Raises:
        ConfigError: the tokens differ.
    """
    if differ := _listed_differences(Fingerprint.from_json(first), fingerprint, "process 0", f"process {process}"):
        raise ConfigError(
            f"data.files: process {process} reads other tokens than process 0",
            rule="same-data: every process makes its rows of a batch from the same tokens",
            picture=differ,
            repair=(
                "name files that all machines share, or copy those of process 0 ('auto': run the same Python"
                " everywhere)"
            ),
        )


def _listed_differences(fingerprint: Fingerprint, other: Fingerprint, name: str, other_name: str) -> str:
    """A line for each of two fingerprints at every difference; empty if there is none."""
    differ = differences(fingerprint, other)
    width = max(len(name), len(other_name))
    return first_of([f"{name:<{width}} {text}\n{other_name:<{width}} {other_text}" for text, other_text in differ])
