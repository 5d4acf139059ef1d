"""Which text is trained on: files to one row of tokens, and a part of it held out.

Goes in: a glob, or "auto" for the source text of the machine's own Python standard library. Comes out:
training tokens and held-out tokens. Left to others: what a token is (`tokenizer`), and cutting them into sequences
(`causal`, `masked`).
"""

from __future__ import annotations

import glob
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpipe.data.tokenizer import Tokenizer
from jaxpipe.errors import ConfigError

BLOCK_TOKENS = 65536  # the held-out part is every k-th block of this many tokens, or smaller for short text
NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens never trained on.

    Attributes:
        num_files: files that the tokens come from.
        train: "tokens", of the type that the tokenizer takes for its vocabulary.
        heldout: "tokens", of the same type.
    """

    num_files: int
    train: np.ndarray
    heldout: np.ndarray


def load_corpus(files: str, *, tokenizer: Tokenizer, heldout_fraction: float, batch_size: int, seq_len: int) -> Corpus:
    """The tokens of `files`, at least one batch to train on and one sequence held out.

    Args:
        files: a glob (`**` descends), or "auto" for the Python standard library without its tests.
        tokenizer: what a token is; its separator ends every file.
        heldout_fraction: about this part of the tokens is held out, in (0, 0.5].
        batch_size: sequences of one step.
        seq_len: tokens of one sequence.

    Raises:
        ConfigError: no file matches, one cannot be read, or the files hold too few tokens.
    """
    paths = _standard_library() if files == "auto" else _matching(files)
    tokens = tokenizer.encode_documents(_read(path, files) for path in paths)
    every = round(1 / heldout_fraction)
    needed = every * max(seq_len + 1, -(-(batch_size * seq_len + 1) // (every - 1)))
    if len(tokens) < needed:
        raise ConfigError(
            f"data.files={files!r} is too short: num_tokens={len(tokens)} in {len(paths)} files\n"
            "  rule enough-text: one batch to train on and one sequence held out\n"
            f"      needed {needed} tokens: batch_size={batch_size} x seq_len={seq_len} + 1, and"
            f" 1 in {every} held out\n"
            f"      found  {len(tokens)} tokens\n"
            "  repair: name more files, or set a smaller data.batch_size or data.seq_len"
        )
    train, heldout = split(tokens, every=every)
    return Corpus(len(paths), train, heldout)


def split(tokens: np.ndarray, *, every: int) -> tuple[np.ndarray, np.ndarray]:
    """`tokens` without every `every`-th block, and those blocks.

    Blocks are spread over the text, so both parts hold the same kinds of files.
    """
    block = np.arange(len(tokens)) // min(BLOCK_TOKENS, len(tokens) // every)
    is_heldout = block % every == every - 1
    return tokens[~is_heldout], tokens[is_heldout]


def _read(path: Path, files: str) -> bytes:
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
