"""Documents of a part of a file: text, or JSON lines with a text under a key.

Goes in: bytes of a file. Comes out: texts with the places they come from; invalid UTF-8 is replaced by U+FFFD and
counted. Left to others: tokens (`encoding`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from jaxpipe.data.prepare.reading import FilePart
from jaxpipe.errors import DataError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSONL = "jsonl: every line is a JSON object with the text of a document"


@dataclass(frozen=True)
class Text:
    """A document, or a part of one."""

    text: str | bytes  # characters, or the unchanged bytes of a text file if tokens are bytes
    is_end: bool  # whether the document ends with it
    num_replaced: int  # places of invalid UTF-8, which were replaced by U+FFFD
    place: str  # the file, and the line if it is one of JSON lines


def texts_of(part: FilePart, *, key: str, keep_bytes: bool) -> Iterator[Text]:
    """Yields the texts of `part`; DataError if a line is not a JSON object with a text under `key`."""
    if part.file.is_jsonl:
        for line in json_lines(part):
            yield _text_under(key, line)
    elif keep_bytes:
        yield Text(part.data, part.is_end, 0, str(part.file.path))
    else:
        text, num_replaced = _decode(part.data)
        yield Text(text, part.is_end, num_replaced, str(part.file.path))


@dataclass(frozen=True)
class JsonLine:
    """A line of JSON: its value, its text, the file and line, and how often invalid UTF-8 was replaced."""

    value: Any
    text: str
    place: str
    num_replaced: int


def json_lines(part: FilePart, *, has_twins: bool = True) -> Iterator[JsonLine]:
    """Yields the lines that are not empty; unless it `has_twins`, a key twice in an object is an error."""
    for line, data in enumerate(part.data.split(b"\n"), part.line):
        if data.strip():
            # A byte order mark can only stand at the beginning of a file.
            data = data.removeprefix(_BYTE_ORDER_MARK) if line == 1 else data
            yield _parse_line(data, f"{part.file.path}:{line}", None if has_twins else _without_twins)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, each key of which is there once: of two, JSON's own parser takes the last in silence."""
    document = dict(pairs)
    if len(document) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} stands twice in one object")
    return document


def _parse_line(data: bytes, place: str, make: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None) -> JsonLine:
    text, num_replaced = _decode(data)
    try:
        return JsonLine(json.loads(text, object_pairs_hook=make), text, place, num_replaced)
    # A value nested too deep is an error of recursion and no ValueError.
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place} is not JSON",
            rule=_JSONL,
            picture=f"{error}: {_shorten(text)}",
            repair="correct or remove the line; --format=text takes a file that is plain text",
        ) from error


def _text_under(key: str, line: JsonLine) -> Text:
    document = line.value
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, str):
        keys = f"; its keys: {', '.join(document)}" if isinstance(document, dict) else ""
        raise DataError(
            f"{line.place} has no text under {key!r}",
            rule=_JSONL,
            picture=f"found {_shorten(line.text)}{keys}",
            repair="name the key of the text with --jsonl_key, or --format=chat for chats, or correct the line",
        )
    text, num_surrogates = replace_surrogates(value)
    return Text(text, True, line.num_replaced + num_surrogates, line.place)


def _decode(data: bytes) -> tuple[str, int]:
    """Returns the text of `data`, and the number of places where invalid UTF-8 was replaced."""
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        # Less those that the text itself has: U+FFFD is a character like others.
        return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def replace_surrogates(text: str) -> tuple[str, int]:
    r"""Returns `text` with U+FFFD for lone surrogates, and their number: JSON can spell "\ud800", UTF-8 cannot."""
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        replaced = "".join(REPLACEMENT if "\ud800" <= letter <= "\udfff" else letter for letter in text)
        return replaced, replaced.count(REPLACEMENT) - text.count(REPLACEMENT)


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."
