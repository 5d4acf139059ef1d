"""Blocks of files to tokens, in whichever process: what a worker does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from jaxpipe.data.byte_tokenizer import ByteTokenizer
from jaxpipe.data.huggingface_tokenizer import HuggingFaceTokenizer
from jaxpipe.data.tokenizer import Tokenizer, load_tokenizer
from jaxpipe.prepare.reading import Part
from jaxpipe.prepare.texts import texts_of
from jaxpipe.prepare.words import WordTable, cuts_like_gpt2

Encode = Callable[[Sequence[str | bytes]], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Job:
    """How all blocks are encoded.

    Attributes:
        tokenizer: "byte", or the path of a tokenizer.json.
        is_masked: whether a masked model will use it.
        key: of the text in a JSON object.
    """

    tokenizer: str
    is_masked: bool
    key: str


@dataclass(frozen=True)
class Counted:
    """How often something happened, and where first.

    Example:
        >>> Counted(0) + Counted(2, "a.txt") + Counted(1, "b.txt")
        Counted(num=3, first='a.txt')
    """

    num: int
    first: str = ""

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.num + other.num, self.first or other.first)


@dataclass(frozen=True)
class Block:
    """The tokens of a block of files.

    Attributes:
        tokens: "tokens", a separator behind every document that ends.
        lengths: "document", tokens of each, all of `tokens` together.
        is_open: whether the last document goes on in the next block.
        num_text_bytes: of text that they come from, in UTF-8.
        replaced: places that were no UTF-8.
        empty: documents without text, which are left out.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_open: bool
    num_text_bytes: int
    replaced: Counted
    empty: Counted


class Encoder:
    """Encodes blocks as `job` says."""

    def __init__(self, job: Job):
        self._key = job.key
        tokenizer = load_tokenizer(job.tokenizer, is_masked=job.is_masked)
        self._separator = tokenizer.separator
        self._keeps_bytes = isinstance(tokenizer, ByteTokenizer)
        self._dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        self._encode = _encode_of(tokenizer)

    def __call__(self, parts: Sequence[Part]) -> Block:
        """The tokens of `parts`.

        Raises:
            DataError: a line holds no document.
        """
        texts = [text for part in parts for text in texts_of(part, key=self._key, keep_bytes=self._keeps_bytes)]
        full = [text for text in texts if text.text]
        replaced = [Counted(text.num_replaced, text.place) for text in texts if text.num_replaced]
        empty = [Counted(1, text.place) for text in texts if not text.text]
        tokens, lengths = self._encode([text.text for text in full])
        is_end = np.array([text.is_end for text in full], bool)
        tokens = np.insert(tokens.astype(self._dtype), np.cumsum(lengths)[is_end], self._separator)
        return Block(
            tokens,
            _joined(lengths + is_end, is_end),
            is_open=bool(full) and not full[-1].is_end,
            num_text_bytes=sum(len(_as_bytes(text.text)) for text in full),
            replaced=sum(replaced, Counted(0)),
            empty=sum(empty, Counted(0)),
        )


def _joined(lengths: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """The lengths of documents, of stretches of which some end one."""
    if not len(lengths):
        return lengths
    firsts = np.flatnonzero(np.concatenate([[True], is_end[:-1]]))
    return np.add.reduceat(lengths, firsts)


def _encode_of(tokenizer: Tokenizer) -> Encode:
    """What gives the tokens of all texts in a row, and the number of each, without separators."""
    if isinstance(tokenizer, ByteTokenizer):
        return _encode_bytes
    library = cast("HuggingFaceTokenizer", tokenizer).library
    if cuts_like_gpt2(library):
        return cast("Encode", WordTable(library).encode)

    def encode(texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
        encodings = library.encode_batch_fast(list(texts), add_special_tokens=False)
        rows = [np.array(encoding.ids, np.int32) for encoding in encodings]
        return np.concatenate([np.zeros(0, np.int32), *rows]), np.array([len(row) for row in rows], np.int64)

    return encode


def _encode_bytes(texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
    rows = [_as_bytes(text) for text in texts]
    return np.frombuffer(b"".join(rows), np.uint8), np.array([len(row) for row in rows], np.int64)


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
