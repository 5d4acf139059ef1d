"""Encodes parts of files: their documents as tokens, and what was replaced or left out.

JSON lines are parsed, and invalid UTF-8 is replaced by U+FFFD and counted. The tokens are those of the tokenizer's own
`encode_batch`, which uses all cores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.data.prepare.reading import FilePart
from jaxpipe.data.protocols import Tokenizer
from jaxpipe.data.tokenizer import ByteTokenizer
from jaxpipe.errors import DataError, explain

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Tally:
    """The number of times that something happened, and where it happened first.

    Example:
        >>> Tally(0) + Tally(2, "a.txt") + Tally(1, "b.txt")
        Tally(num=3, first='a.txt')
    """

    num: int
    first: str = ""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.num + other.num, self.first or other.first)


@dataclass(frozen=True)
class EncodedBlock:
    """The tokens of a block of files.

    Attributes:
        tokens: "tokens", with a separator after every document that ends.
        lengths: "document", tokens of each; together all of `tokens`.
        is_open: whether the last document continues in the next block.
        num_text_bytes: bytes of the text in UTF-8.
        replaced: places of invalid UTF-8.
        empty: documents without text, which are left out.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_open: bool
    num_text_bytes: int
    replaced: Tally
    empty: Tally


def encode_block(parts: Sequence[FilePart], tokenizer: Tokenizer, *, key: str) -> EncodedBlock:
    """Returns the tokens of `parts`.

    Args:
        parts: consecutive parts of files.
        tokenizer: encodes the text of each document.
        key: key of the text in a line's JSON object.

    Raises:
        DataError: a line contains no document.
    """
    keep_bytes = isinstance(tokenizer, ByteTokenizer)
    texts = [text for part in parts for text in texts_of(part, key=key, keep_bytes=keep_bytes)]
    full = [text for text in texts if text.text]
    rows = tokenizer.encode_batch([text.text for text in full])
    lengths = np.array([len(row) for row in rows], np.int64)
    is_end = np.array([text.is_end for text in full], bool)
    tokens = np.concatenate([tokenizer.encode(""), *rows])
    return EncodedBlock(
        np.insert(tokens, np.cumsum(lengths)[is_end], tokenizer.separator),
        _document_lengths(lengths + is_end, is_end),
        is_open=bool(full) and not full[-1].is_end,
        num_text_bytes=sum(len(_as_bytes(text.text)) for text in full),
        replaced=sum((Tally(text.num_replaced, text.place) for text in texts if text.num_replaced), Tally(0)),
        empty=sum((Tally(1, text.place) for text in texts if not text.text), Tally(0)),
    )


def _document_lengths(lengths: np.ndarray, is_end: np.ndarray) -> np.ndarray:
    """Returns the lengths of documents, given those of parts of documents, some of which end one.

    Example:
        >>> _document_lengths(np.array([5, 7, 2, 4]), np.array([True, False, True, False]))
        array([5, 9, 4])
    """
    if not len(lengths):
        return lengths
    firsts = np.flatnonzero(np.concatenate([[True], is_end[:-1]]))
    return np.add.reduceat(lengths, firsts)


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


@dataclass(frozen=True)
class Text:
    """A document, or a part of one.

    Attributes:
        text: characters, or the unchanged bytes of a text file if tokens are bytes.
        is_end: whether the document ends with it.
        num_replaced: places of invalid UTF-8, which were replaced by U+FFFD.
        place: the file, and the line if it is one of JSON lines.
    """

    text: str | bytes
    is_end: bool
    num_replaced: int
    place: str


def texts_of(part: FilePart, *, key: str, keep_bytes: bool) -> Iterator[Text]:
    """Yields the texts of `part`.

    Args:
        part: the part of a file.
        key: key of the text in a line's JSON object.
        keep_bytes: whether the bytes of a text file stay as they are.

    Raises:
        DataError: a line is not a JSON object with a text under `key`.
    """
    if part.file.is_jsonl:
        for line, data in enumerate(part.data.split(b"\n"), part.line):
            if data.strip():
                yield _parse_line(data, key, part, line)
    elif keep_bytes:
        yield Text(part.data, part.is_end, 0, str(part.file.path))
    else:
        text, num_replaced = _decode(part.data)
        yield Text(text, part.is_end, num_replaced, str(part.file.path))


def _parse_line(data: bytes, key: str, part: FilePart, line: int) -> Text:
    data = data.removeprefix(_BYTE_ORDER_MARK) if line == 1 else data
    text, num_replaced = _decode(data)
    place = f"{part.file.path}:{line}"
    rule = "jsonl: every line is a JSON object with the text of a document"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            explain(
                f"{place} is not JSON",
                rule=rule,
                picture=f"{error}: {_shorten(text)}",
                repair="correct or remove the line; --format=text takes a file that is plain text",
            )
        ) from error
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, str):
        keys = f"; its keys: {', '.join(document)}" if isinstance(document, dict) else ""
        raise DataError(
            explain(
                f"{place} has no text under {key!r}",
                rule=rule,
                picture=f"found {_shorten(text)}{keys}",
                repair="name the key of the text with --jsonl_key, or correct the line",
            )
        )
    text, num_surrogates = _replace_surrogates(value)
    return Text(text, True, num_replaced + num_surrogates, place)


def _decode(data: bytes) -> tuple[str, int]:
    """Returns the text of `data`, and the number of places where invalid UTF-8 was replaced."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def _replace_surrogates(text: str) -> tuple[str, int]:
    r"""Returns `text` with U+FFFD for lone surrogates, and their number: JSON can spell "\ud800", UTF-8 cannot."""
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        replaced = "".join(REPLACEMENT if "\ud800" <= letter <= "\udfff" else letter for letter in text)
        return replaced, replaced.count(REPLACEMENT) - text.count(REPLACEMENT)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."
