"""A fingerprint of the tokens of a run, which identifies them wherever their files are.

Goes in: the sources of a corpus, their weights, the tokenizer. Comes out: a small value that can be written as JSON,
and a description of how two of them differ. Left to others: when it is written and compared (`training.same_data`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from itertools import zip_longest

import numpy as np

from jaxpipe.data.protocols import Documents, Tokenizer, Tokens

BLOCK_TOKENS = 2**14
MAX_WHOLE_TOKENS = 2**24  # shorter sources are read whole, in less than a tenth of a second
NUM_BLOCKS = 64  # read of a longer source: 2**20 tokens, at most 4 MiB


@dataclass(frozen=True)
class SourceFingerprint:
    """The fingerprint of one source of tokens."""

    name: str = field(compare=False)  # the source's name in `data.files`; not compared, since files may move
    share: str  # the source's share of a batch, a fraction
    num_tokens: int  # length of the source
    # Checksum of the source's tokens as 32-bit little-endian integers, and of which of them are learned if not all are;
    # for a long source, of evenly spaced blocks.
    crc32: str
    # Checksum of where documents begin and end, if rows are made of them; None for others, and in the fingerprint of an
    # old run, which then is not compared.
    documents: str | None = None

    def __str__(self) -> str:
        ends = f", crc32 of their documents {self.documents}" if self.documents else ""
        return f"{self.name!r}, {self.num_tokens:,} tokens, crc32 {self.crc32}{ends}, {self.share} of a batch"


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of everything but the config's numbers that determines the tokens of a batch."""

    vocab_size: int
    tokenizer: str  # the `identity` of the tokenizer
    # The fingerprint of each source, in the order that the order of the batches depends on.
    sources: tuple[SourceFingerprint, ...]

    def to_json(self) -> str:
        """The JSON text that `from_json` reads."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> Fingerprint:
        """The fingerprint that `to_json` wrote; KeyError, TypeError or ValueError if the text is none."""
        content = json.loads(text)
        sources = tuple(SourceFingerprint(**source) for source in content["sources"])
        return cls(content["vocab_size"], content["tokenizer"], sources)


def fingerprint(
    sources: Mapping[str, Tokens], weights: Mapping[str, Fraction], tokenizer: Tokenizer, *, by_documents: bool = False
) -> Fingerprint:
    """Returns the fingerprint of `sources`; only a few blocks of long ones are read.

    Example:
        >>> from jaxpipe.data import load_tokenizer
        >>> tokens = np.frombuffer(b"123456789", np.uint8)
        >>> found = fingerprint({"a": tokens}, {"a": Fraction(7)}, load_tokenizer("byte", is_masked=False))
        >>> found.sources[0].share, found.sources[0].num_tokens
        ('1', 9)
    """
    total = sum(weights.values())
    of_sources = tuple(
        SourceFingerprint(
            name,
            str(weights[name] / total),
            len(tokens),
            f"{_crc32(tokens):08x}",
            _crc32_of_spans(tokens) if by_documents and isinstance(tokens, Documents) else None,
        )
        for name, tokens in sources.items()
    )
    return Fingerprint(tokenizer.vocab_size, tokenizer.identity, of_sources)


def differences(one: Fingerprint, other: Fingerprint) -> list[tuple[str, str]]:
    """Returns a pair of descriptions for each difference: what it is in `one`, and what it is in `other`."""
    differ = []
    if (one.vocab_size, one.tokenizer) != (other.vocab_size, other.tokenizer):
        differ.append((_format_tokenizer(one), _format_tokenizer(other)))
    pairs = enumerate(zip_longest(one.sources, other.sources), start=1)
    differ += [(f"source {n}: {a or 'none'}", f"source {n}: {b or 'none'}") for n, (a, b) in pairs if not _agree(a, b)]
    return differ


def _agree(one: SourceFingerprint | None, other: SourceFingerprint | None) -> bool:
    # An old run's fingerprint says nothing of documents, and so contradicts none.
    if one and other and None in (one.documents, other.documents):
        return replace(one, documents=None) == replace(other, documents=None)
    return one == other


def _format_tokenizer(fingerprint: Fingerprint) -> str:
    return f"tokenizer: {fingerprint.vocab_size:,} tokens, {fingerprint.tokenizer}"


def _crc32(tokens: Tokens) -> int:
    learned = tokens.learned if isinstance(tokens, Documents) else None
    # Without `learned` nothing is added, so that fingerprints of older runs stay equal.
    return _crc32_from(_crc32_from(0, tokens), learned) if learned is not None else _crc32_from(0, tokens)


def _crc32_of_spans(documents: Documents) -> str:
    starts, ends = (bounds.astype("<i8").tobytes() for bounds in documents.spans)
    return f"{zlib.crc32(ends, zlib.crc32(starts)):08x}"


def _crc32_from(crc: int, tokens: Tokens) -> int:
    for start in _block_starts(len(tokens)):
        block = tokens[np.arange(start, min(start + BLOCK_TOKENS, len(tokens)))]
        # As int32 whatever the file's type: the same tokens have the same checksum.
        crc = zlib.crc32(block.astype("<i4").tobytes(), crc)
    return crc


def _block_starts(num_tokens: int) -> Iterator[int]:
    """Yields where blocks begin: all of them, or evenly spaced ones including the first and the last."""
    if num_tokens <= MAX_WHOLE_TOKENS:
        yield from range(0, num_tokens, BLOCK_TOKENS)
        return
    for block in range(NUM_BLOCKS):
        # - 1: the last block ends with the source.
        yield block * (num_tokens - BLOCK_TOKENS) // (NUM_BLOCKS - 1)
