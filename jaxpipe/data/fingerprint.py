"""By what the tokens of a run are known again, wherever their files lie and whatever they are called.

Goes in: the rows of tokens of a corpus, their weights, the tokenizer. Comes out: a small value, as JSON too, and in
words how two of them differ. Left to others: when it is written and compared, and what follows (`training.same_data`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import zip_longest

import numpy as np

from jaxpipe.data.blocks import Tokens
from jaxpipe.data.tokenizer import Tokenizer

BLOCK_TOKENS = 2**14
MOST_WHOLE_TOKENS = 2**24  # up to so many all are read, in less than a tenth of a second
NUM_BLOCKS = 64  # of a longer row: 2**20 tokens, at most 4 MiB where they are of 32 bits


@dataclass(frozen=True)
class SourceFingerprint:
    """Of a row of tokens.

    Attributes:
        name: what `data.files` calls it; not compared, since files may move.
        share: of a batch, a fraction.
        num_tokens: of the row.
        crc32: of its tokens as little-endian numbers of 32 bits, of a long row of evenly spread blocks.
    """

    name: str = field(compare=False)
    share: str
    num_tokens: int
    crc32: str

    def __str__(self) -> str:
        """On one line."""
        return f"{self.name!r}, {self.num_tokens:,} tokens, crc32 {self.crc32}, {self.share} of a batch"


@dataclass(frozen=True)
class Fingerprint:
    """Of all that decides which tokens a batch has, but for the config's numbers.

    Attributes:
        vocab_size: of the tokenizer.
        tokenizer: its `identity`.
        sources: in their order, which decides the order of batches too.
    """

    vocab_size: int
    tokenizer: str
    sources: tuple[SourceFingerprint, ...]

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """The fingerprint that `to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        found = json.loads(text)
        sources = tuple(SourceFingerprint(**source) for source in found["sources"])
        return cls(found["vocab_size"], found["tokenizer"], sources)


def fingerprint(rows: Mapping[str, Tokens], weights: Mapping[str, Fraction], tokenizer: Tokenizer) -> Fingerprint:
    """The fingerprint of `rows`; of memory-mapped ones only a few blocks are read.

    Args:
        rows: tokens by the names of their sources.
        weights: of each source.
        tokenizer: that they are words of.

    Example:
        >>> from jaxpipe.data import load_tokenizer
        >>> row = np.frombuffer(b"123456789", np.uint8)
        >>> found = fingerprint({"a": row}, {"a": Fraction(7)}, load_tokenizer("byte", is_masked=False))
        >>> found.sources[0].share, found.sources[0].num_tokens
        ('1', 9)
    """
    total = sum(weights.values())
    sources = tuple(
        SourceFingerprint(name, str(weights[name] / total), len(row), f"{_crc32(row):08x}")
        for name, row in rows.items()
    )
    return Fingerprint(tokenizer.vocab_size, tokenizer.identity, sources)


def differences(one: Fingerprint, other: Fingerprint) -> list[tuple[str, str]]:
    """What differs, in words: of each such thing what it is in `one` and what it is in `other`."""
    differ = []
    if (one.vocab_size, one.tokenizer) != (other.vocab_size, other.tokenizer):
        differ.append((_tokenizer_in_words(one), _tokenizer_in_words(other)))
    pairs = enumerate(zip_longest(one.sources, other.sources), start=1)
    differ += [(f"source {n}: {a or 'none'}", f"source {n}: {b or 'none'}") for n, (a, b) in pairs if a != b]
    return differ


def _tokenizer_in_words(found: Fingerprint) -> str:
    return f"tokenizer: {found.vocab_size:,} words, {found.tokenizer}"


def _crc32(row: Tokens) -> int:
    crc = 0
    for start in _block_starts(len(row)):
        block = row[np.arange(start, min(start + BLOCK_TOKENS, len(row)))]
        crc = zlib.crc32(block.astype("<i4").tobytes(), crc)
    return crc


def _block_starts(num_tokens: int) -> Iterator[int]:
    """Where blocks begin: all there are, or evenly spread ones, the first and the last among them."""
    if num_tokens <= MOST_WHOLE_TOKENS:
        yield from range(0, num_tokens, BLOCK_TOKENS)
        return
    for block in range(NUM_BLOCKS):
        yield block * (num_tokens - BLOCK_TOKENS) // (NUM_BLOCKS - 1)
