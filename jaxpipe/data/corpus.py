"""Which tokens are trained on and which are held out, for whatever `data.files` names.

Goes in: text files, which are read and become one source, or prepared ones, which stay where they are and are a source
each. Comes out: sources and their weights, of both parts. Left to others: what a token is (`tokenizer`), how files are
found and prepared ones mapped (`text_files`, `blend`, `indexed`), and cutting tokens into sequences (`causal`,
`masked`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from jaxpipe.data.blend import INDEXED, parse_blend
from jaxpipe.data.blocks import Tokens, split
from jaxpipe.data.fingerprint import Fingerprint, fingerprint
from jaxpipe.data.indexed import IndexedTokens
from jaxpipe.data.indexed_format import tokens_path
from jaxpipe.data.known_tokens import KnownTokens
from jaxpipe.data.text_files import read_text_file, text_files
from jaxpipe.data.tokenizer import Tokenizer
from jaxpipe.errors import ConfigError


@dataclass(frozen=True)
class Part:
    """Tokens to train on, or held out.

    Attributes:
        sources: a row of tokens each.
        weights: of each source; its share in a batch is its weight over the sum of all.
    """

    sources: tuple[Tokens, ...]
    weights: tuple[Fraction, ...] = (Fraction(1),)

    def __len__(self) -> int:
        """Tokens of all sources."""
        return sum(len(source) for source in self.sources)


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and tokens never trained on.

    Attributes:
        num_files: files that the tokens come from.
        train: what is trained on.
        heldout: the same sources with the same weights, other tokens of them.
        rows: all tokens of each source, by its name, in the order of the sources.
        tokenizer: that they are words of.
    """

    num_files: int
    train: Part
    heldout: Part
    rows: Mapping[str, Tokens]
    tokenizer: Tokenizer

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """By what these tokens are known again, wherever their files lie.

        Raises:
            DataError: a file holds what the model has no words for.
        """
        return fingerprint(self.rows, dict(zip(self.rows, self.train.weights, strict=True)), self.tokenizer)


def load_corpus(
    files: str, *, tokenizer: Tokenizer, vocab_size: int, heldout_fraction: float, batch_size: int, seq_len: int
) -> Corpus:
    """The tokens of `files`, of each source enough for its share of a batch and one sequence held out.

    Args:
        files: a glob (`**` descends), or "auto" for the Python standard library without its tests, or "indexed:"
            and what `parse_blend` takes.
        tokenizer: what a token of text is; its separator ends every file.
        vocab_size: every token of a prepared file is less, which is seen when it is read.
        heldout_fraction: about this part of the tokens is held out, in (0, 0.5].
        batch_size: sequences of one step.
        seq_len: tokens of one sequence.

    Raises:
        ConfigError: no file matches, one cannot be read, or one source holds too few tokens.
        DataError: a prepared file is damaged.
    """
    every = round(1 / heldout_fraction)
    if files.startswith(INDEXED):
        weights = parse_blend(files)
        num_files = len(weights)
        rows = {prefix: _open(prefix, vocab_size) for prefix in weights}
    else:
        paths = text_files(files)
        num_files, weights = len(paths), {files: Fraction(1)}
        rows = {files: tokenizer.encode_documents(read_text_file(path, files) for path in paths)}
    for name, row in rows.items():
        num_sequences = math.ceil(batch_size * weights[name] / sum(weights.values()))
        _check_length(name, len(row), num_sequences=num_sequences, seq_len=seq_len, every=every)
    train, heldout = zip(*(split(row, every=every) for row in rows.values()), strict=True)
    shares = tuple(weights.values())
    return Corpus(num_files, Part(train, shares), Part(heldout, shares), rows, tokenizer)


def _open(prefix: str, vocab_size: int) -> KnownTokens:
    return KnownTokens(IndexedTokens.open(prefix).tokens, str(tokens_path(prefix)), vocab_size)


def _check_length(name: str, num_tokens: int, *, num_sequences: int, seq_len: int, every: int) -> None:
    """Raises ConfigError where one of `every` blocks of `num_tokens` cannot be held out and the rest be trained on."""
    needed = every * max(seq_len + 1, -(-(num_sequences * seq_len + 1) // (every - 1)))
    if num_tokens < needed:
        raise ConfigError(
            f"data.files: {name!r} is too short: num_tokens={num_tokens}\n"
            "  rule enough-text: of every source its share of a batch to train on and one sequence held out\n"
            f"      needed {needed} tokens: {num_sequences} sequences x seq_len={seq_len} + 1, and"
            f" 1 in {every} held out\n"
            f"      found  {num_tokens} tokens\n"
            "  repair: name more files, or set a smaller data.batch_size or data.seq_len"
        )
