"""Encodes parts of files: their documents as tokens, and what was replaced or left out.

JSON lines are parsed, and invalid UTF-8 is replaced by U+FFFD and counted. The tokens are those of the tokenizer's own
`encode_batch`, which uses all cores.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpipe.data.prepare.chat import ChatTemplate, MarkedText, marked_text
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
        unknown: tokens that stand for what the vocabulary lacks.
        dropped: characters that the vocabulary lacks, if the tokenizer leaves them out.
        learned: for each token 1 if it is learned, 0 if it is only read; None: all are.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    is_open: bool
    num_text_bytes: int
    replaced: Tally
    empty: Tally
    unknown: Tally
    dropped: Counter[str]
    learned: np.ndarray | None = None


@dataclass(frozen=True)
class ChatForm:
    """How lines of conversations become documents.

    Attributes:
        template: of the tokenizer, or None.
        tokenizer: its name, for messages.
        seq_len: the most tokens that a conversation may predict, as `data.seq_len`.
    """

    template: ChatTemplate | None
    tokenizer: str
    seq_len: int


def encode_chat(parts: Sequence[FilePart], tokenizer: Tokenizer, form: ChatForm) -> EncodedBlock:
    """Returns the tokens of the conversations of `parts`, in which answers alone are learned.

    A prompt with its answer ends with a separator, which is learned; messages end as their template ends them.

    Raises:
        DataError: a line is no conversation, or is longer than a row; `chat.marked_text` has the others.
    """
    special = tokenizer.special_names
    lines = [line for part in parts for line in _json_lines(part)]
    found = [
        marked_text(line.value, form.template, special=special, place=line.place, tokenizer=form.tokenizer)
        for line in lines
    ]
    # One letter for another: the spans stay where they are.
    texts = [replace(text, text=_replace_surrogates(text.text)[0]) for text in found]
    documents: list[tuple[np.ndarray, np.ndarray]] = [(tokenizer.encode(""), np.zeros(0, np.uint8))]
    for line, text in zip(lines, texts, strict=True):
        tokens, learned = (_rendered if text.has_special else _answered)(text, tokenizer)
        _check_length(len(tokens) - 1, form.seq_len, line.place)
        if not learned[1:].any():
            raise DataError(
                explain(
                    f"{line.place} has nothing to learn",
                    rule="chat-answer: a conversation has an answer of one token or more, after its first token",
                    picture="its answers are empty, once the chat template has written them",
                    repair="correct or remove the line; or mark the answers in the template by {% generation %} ..."
                    " {% endgeneration %}",
                )
            )
        documents.append((tokens, learned))
    tokens, learned = (np.concatenate(some) for some in zip(*documents, strict=True))
    return EncodedBlock(
        tokens,
        np.array([len(one) for one, _ in documents[1:]], np.int64),
        is_open=False,
        num_text_bytes=sum(len(text.text.encode()) for text in texts),
        replaced=sum((Tally(line.num_replaced, line.place) for line in lines if line.num_replaced), Tally(0)),
        empty=Tally(0),
        unknown=_unknown(tokenizer, [one for one, _ in documents[1:]], [line.place for line in lines]),
        dropped=sum((_dropped(tokenizer, [text.text], has_special=text.has_special) for text in texts), Counter()),
        learned=learned,
    )


def _rendered(text: MarkedText, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a rendered conversation, and which are learned: those with any character of an answer.

    So a word of an answer is learned with the space before it, as in transformers.
    """
    ((tokens, first, stop),) = tokenizer.encode_places([text.text])
    learned = np.zeros(len(tokens), np.uint8)
    for begin, end in text.spans:
        learned |= (begin < stop) & (first < end)
    return tokens, learned


def _answered(text: MarkedText, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of a prompt, and of its answer by itself, with a separator: as if the model went on from the prompt."""
    ((begin, _),) = text.spans
    answer = tokenizer.encode(text.text[begin:])
    prompt = [*tokenizer.beginning, *tokenizer.encode(text.text[:begin])]  # as jaxpipe.sample gives it to the model
    tokens = np.concatenate([np.array(prompt, answer.dtype), answer, [tokenizer.separator]]).astype(answer.dtype)
    return tokens, (np.arange(len(tokens)) >= len(prompt)).astype(np.uint8)


def _check_length(num_predicted: int, seq_len: int, place: str) -> None:
    if num_predicted > seq_len:
        raise DataError(
            explain(
                f"{place} is longer than a row",
                rule="chat-length: a conversation is not cut, so it fits into a row of data.seq_len tokens",
                picture=f"{num_predicted} tokens to predict, --seq_len={seq_len}",
                repair="set a larger --seq_len, and train with data.seq_len as large; or shorten or remove the line",
            )
        )


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
        unknown=_unknown(tokenizer, rows, [text.place for text in full]),
        dropped=_dropped(tokenizer, [text.text for text in full]),
    )


def _dropped(tokenizer: Tokenizer, texts: Sequence[str | bytes], *, has_special: bool = False) -> Counter[str]:
    """The characters of `texts` that the tokenizer has left out; if it leaves none out, they were an error before."""
    return tokenizer.lacking(texts, has_special=has_special) if tokenizer.drops else Counter()


def _unknown(tokenizer: Tokenizer, rows: Sequence[np.ndarray], places: Sequence[str]) -> Tally:
    """The number of unknown tokens of `rows`, which come from `places`."""
    if tokenizer.unknown is None:
        return Tally(0)
    counts = (int(np.count_nonzero(row == tokenizer.unknown)) for row in rows)
    return sum((Tally(num, place) for num, place in zip(counts, places, strict=True) if num), Tally(0))


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
        for line in _json_lines(part):
            yield _text_under(key, line)
    elif keep_bytes:
        yield Text(part.data, part.is_end, 0, str(part.file.path))
    else:
        text, num_replaced = _decode(part.data)
        yield Text(text, part.is_end, num_replaced, str(part.file.path))


_JSONL = "jsonl: every line is a JSON object with the text of a document"


@dataclass(frozen=True)
class _Line:
    """A line of JSON: its value, its text, the file and line, and how often invalid UTF-8 was replaced."""

    value: Any
    text: str
    place: str
    num_replaced: int


def _json_lines(part: FilePart) -> Iterator[_Line]:
    """Yields the lines that are not empty."""
    for line, data in enumerate(part.data.split(b"\n"), part.line):
        if data.strip():
            yield _parse_line(data.removeprefix(_BYTE_ORDER_MARK) if line == 1 else data, f"{part.file.path}:{line}")


def _parse_line(data: bytes, place: str) -> _Line:
    text, num_replaced = _decode(data)
    try:
        return _Line(json.loads(text), text, place, num_replaced)
    except (ValueError, RecursionError) as error:
        raise DataError(
            explain(
                f"{place} is not JSON",
                rule=_JSONL,
                picture=f"{error}: {_shorten(text)}",
                repair="correct or remove the line; --format=text takes a file that is plain text",
            )
        ) from error


def _text_under(key: str, line: _Line) -> Text:
    document = line.value
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, str):
        keys = f"; its keys: {', '.join(document)}" if isinstance(document, dict) else ""
        raise DataError(
            explain(
                f"{line.place} has no text under {key!r}",
                rule=_JSONL,
                picture=f"found {_shorten(line.text)}{keys}",
                repair="name the key of the text with --jsonl_key, or --format=chat for chats, or correct the line",
            )
        )
    text, num_surrogates = _replace_surrogates(value)
    return Text(text, True, line.num_replaced + num_surrogates, line.place)


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
