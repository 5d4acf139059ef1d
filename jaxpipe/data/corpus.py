"""The tokens that `data.files` names, split into those to train on and those held out.

Goes in: text files, which are read and become one source, or prepared files, which are read where a batch needs them
and are one source each. Comes out: the sources and weights of both parts. Left to others: what a token is
(`tokenizer`), how files are found (`files`) and read (`indexed`), and cutting tokens into sequences (`packing`,
`masked`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property

import numpy as np

from jaxpipe.data.files import INDEXED, parse_blend, read_text_file, text_files
from jaxpipe.data.fingerprint import Fingerprint, fingerprint
from jaxpipe.data.indexed import IndexedTokens, read_learned, tokens_path
from jaxpipe.data.packing import ranges
from jaxpipe.data.protocols import Documents, Tokenizer, Tokens
from jaxpipe.errors import ConfigError, DataError

BLOCK_TOKENS = 65536  # every k-th block of this many tokens is held out; blocks of short text are smaller


@dataclass(frozen=True)
class Blend:
    """Sources of tokens, and their weights in a batch."""

    sources: tuple[Documents, ...]  # the documents of each source
    # The weight of each source; a source's share of a batch is its weight over the sum of all.
    weights: tuple[Fraction, ...] = (Fraction(1),)

    def __len__(self) -> int:
        return sum(len(source) for source in self.sources)


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on, and tokens that are never trained on."""

    num_files: int  # number of files that the tokens come from
    train: Blend  # the tokens to train on
    heldout: Blend  # other tokens of the same sources, with the same weights
    sources: Mapping[str, Documents]  # all tokens of each source, by its name
    tokenizer: Tokenizer  # gives the tokens their meaning
    by_documents: bool = False  # whether rows are made of whole documents

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """The fingerprint, wherever files are; DataError if one contains a token outside the model's vocabulary."""
        weights = dict(zip(self.sources, self.train.weights, strict=True))
        return fingerprint(self.sources, weights, self.tokenizer, by_documents=self.by_documents)


def load_corpus(
    files: str,
    *,
    tokenizer: Tokenizer,
    vocab_size: int,
    heldout_fraction: float,
    batch_size: int,
    seq_len: int,
    by_documents: bool = False,
) -> Corpus:
    """Returns the tokens of `files`; each source has enough for its share of a batch and one held-out sequence.

    Args:
        files: a glob (`**` descends), or "auto" for the Python standard library without its tests, or "indexed:"
            followed by what `parse_blend` takes.
        tokenizer: turns text into tokens; its separator follows every file.
        vocab_size: upper bound of the tokens of prepared files; each token is checked when it is read.
        heldout_fraction: about this fraction of the tokens is held out, in (0, 0.5].
        by_documents: whether whole documents are held out, not blocks of the running text.

    Raises:
        ConfigError: no file matches, one cannot be read, or a source contains too few tokens.
        DataError: a prepared file is damaged.
    """
    # Bounded, since a tiny fraction's inverse is infinite, which is no number of blocks.
    every = round(min(1 / heldout_fraction, 1e18))
    if files.startswith(INDEXED):
        weights = parse_blend(files)
        num_files = len(weights)
        texts = [IndexedTokens.open(prefix) for prefix in weights]
        tokens = [CheckedTokens(text.tokens, str(tokens_path(text.prefix)), vocab_size) for text in texts]
        sources = {
            text.prefix: Documents.ending_at(checked, text.ends, read_learned(text))
            for text, checked in zip(texts, tokens, strict=True)
        }
    else:
        paths = text_files(files)
        num_files = len(paths)
        weights = {files: Fraction(1)}
        documents = [*tokenizer.encode_documents(read_text_file(path, files) for path in paths)]
        ends = np.cumsum([len(tokens) for tokens in documents], dtype=np.int64)
        sources = {files: Documents.ending_at(np.concatenate(documents), lambda: ends)}
    for name, tokens in sources.items():
        num_sequences = math.ceil(batch_size * weights[name] / sum(weights.values()))
        _check_length(name, len(tokens), num_sequences=num_sequences, seq_len=seq_len, every=every)
    split = split_documents if by_documents else split_blocks
    train, heldout = zip(
        *(split(documents, every=every, seq_len=seq_len) for documents in sources.values()), strict=True
    )
    shares = tuple(weights.values())
    return Corpus(num_files, Blend(train, shares), Blend(heldout, shares), sources, tokenizer, by_documents)


@dataclass(frozen=True)
class Blocks:
    """A view of some tokens without copying: every `every`-th block, or all other blocks.

        every=3      | 0 | 1 | 2 | 3 | 4 | 5 | 6 |
        train          0   1       3   4       6
        held out               2           5

    Example:
        >>> train, heldout = (Blocks(np.arange(14), 2, 3, is_heldout) for is_heldout in (False, True))
        >>> train[np.arange(len(train))], heldout[np.arange(len(heldout))]
        (array([ 0,  1,  2,  3,  6,  7,  8,  9, 12, 13]), array([ 4,  5, 10, 11]))
    """

    tokens: Tokens  # all blocks; only those that are indexed are read
    block_size: int  # tokens of a block; the last one may have fewer
    every: int  # the last block of each `every` blocks is held out; at least 2
    is_heldout: bool

    def __len__(self) -> int:
        num_full, rest = divmod(len(self.tokens), self.block_size * self.every)
        # The rest is a cycle that has begun: first its blocks to train on, then the held-out one.
        in_rest = max(0, rest - self._num_train)
        num_heldout = num_full * self.block_size + in_rest
        return num_heldout if self.is_heldout else len(self.tokens) - num_heldout

    def __getitem__(self, positions: np.ndarray, /) -> np.ndarray:
        """Returns the tokens at `positions` of this part, of the same shape."""
        run = self.block_size if self.is_heldout else self._num_train
        skipped = self._num_train if self.is_heldout else self.block_size
        # A held-out block comes behind the blocks to train on of its own cycle, so it has skipped them once more.
        return self.tokens[positions + (positions // run + self.is_heldout) * skipped]

    @property
    def _num_train(self) -> int:
        """Tokens to train on between two held-out blocks."""
        return self.block_size * (self.every - 1)


def split_blocks(documents: Documents, *, every: int, seq_len: int) -> tuple[Documents, Documents]:
    """Returns the tokens of `documents` without every `every`-th block, and those blocks, each as one document.

    Blocks are spread over the text, so both parts contain the same kinds of documents.

    Args:
        every: one of so many blocks is held out.
        seq_len: tokens that a sequence predicts; blocks are larger where those held out would have none.
    """
    block_size = min(BLOCK_TOKENS, len(documents) // every)
    # Text shorter than a cycle would hold nothing out.
    if len(Blocks(documents.tokens, block_size, every, is_heldout=True)) <= seq_len:
        block_size = min(seq_len + 1, len(documents) // every)

    def part(*, is_heldout: bool) -> Documents:
        def block(tokens: Tokens) -> Blocks:
            return Blocks(tokens, block_size, every, is_heldout)

        learned = documents.learned
        tokens = block(documents.tokens)
        return replace(Documents.one(tokens), learned=None if learned is None else block(learned))

    return part(is_heldout=False), part(is_heldout=True)


def split_documents(documents: Documents, *, every: int, seq_len: int) -> tuple[Documents, Documents]:
    """Returns the `documents` to train on, and those held out: those that begin in the blocks of `split_blocks`.

    A document that is longer than a row, which is cut in any case, is cut where a block begins or ends, too.

    Args:
        seq_len: the most tokens that a document predicts in a row.
    """
    block_size = min(BLOCK_TOKENS, len(documents) // every)

    @cache
    def spans() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        starts, ends = documents.spans
        # One cycle more than the text has, so that the last border is behind every document.
        cycles = np.arange(0, len(documents) + block_size * every, block_size * every)
        borders = np.sort(np.concatenate([cycles, cycles + block_size * (every - 1)]))
        # The borders inside each long document; of a short one there are none.
        first = np.searchsorted(borders, starts, side="right")
        last = np.searchsorted(borders, ends, side="left")
        # - 1: the first token of a document is not predicted.
        num_inside = np.where(ends - starts - 1 > seq_len, np.maximum(last - first, 0), 0)
        inside = borders[ranges(first, num_inside)]
        starts = np.sort(np.concatenate([starts, inside]))
        ends = np.sort(np.concatenate([ends, inside]))
        return starts, ends, starts % (block_size * every) >= block_size * (every - 1)

    def part(*, is_heldout: bool) -> Documents:
        def of_part() -> tuple[np.ndarray, np.ndarray]:
            starts, ends, are_heldout = spans()
            return starts[are_heldout == is_heldout], ends[are_heldout == is_heldout]

        return replace(documents, find_spans=of_part, are_some=True)

    return part(is_heldout=False), part(is_heldout=True)


@dataclass(frozen=True)
class CheckedTokens:
    """The tokens of a file, each checked against the vocabulary when it is read: a file may be of any size."""

    tokens: Tokens  # the tokens of the file, of any integer type
    file: str  # the file's name, for messages
    vocab_size: int  # upper bound of the tokens; every token is less

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, positions: np.ndarray, /) -> np.ndarray:
        """Returns the tokens at `positions`, of the same shape; DataError if one of them is not in the vocabulary."""
        tokens = self.tokens[positions]
        # The smallest of no tokens is an error of NumPy.
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise self._unknown(positions, tokens)
        return tokens

    def _unknown(self, positions: np.ndarray, tokens: np.ndarray) -> DataError:
        first = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0]
        return DataError(
            f"{self.file}: token {tokens.flat[first]} at position {positions.flat[first]} is not in the vocabulary",
            rule="known-tokens: every token of a file is in the vocabulary of the model",
            picture=f"vocab_size={self.vocab_size}: tokens 0 .. {self.vocab_size - 1}",
            repair="set data.tokenizer to the one that the file was prepared with, and model.vocab_size for it",
        )


def _check_length(name: str, num_tokens: int, *, num_sequences: int, seq_len: int, every: int) -> None:
    """Raises ConfigError if `num_tokens` are too few for the batch and the held-out part.

    Of `every` blocks one is held out, which needs seq_len + 1 tokens; the others hold the source's share of a batch.
    """
    # Tokens that a block needs: the held-out one a sequence and its last target, the others their part of a batch.
    held_out = seq_len + 1
    trained = -(-(num_sequences * seq_len + 1) // (every - 1))
    needed = every * max(held_out, trained)
    if num_tokens < needed:
        raise ConfigError(
            f"data.files: {name!r} is too short: num_tokens={num_tokens}",
            rule="enough-text: every source has its share of a batch to train on, and one sequence held out",
            picture=f"needed {needed} tokens: {num_sequences} sequences x seq_len={seq_len} + 1, and"
            f" 1 in {every} held out\n"
            f"found  {num_tokens} tokens",
            repair="name more files, set a smaller data.seq_len, or "
            + ("a larger data.heldout_fraction" if held_out > trained else "a smaller data.batch_size"),
        )
