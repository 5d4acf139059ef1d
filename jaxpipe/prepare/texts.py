"""Parts of files to texts: JSON lines parsed, and what is no UTF-8 replaced and counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from jaxpipe.errors import DataError
from jaxpipe.prepare.reading import Part

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Text:
    """A document, or a stretch of one.

    Attributes:
        text: bytes as they stand in the file, of a text file for tokens that are bytes; else characters.
        is_end: whether the document ends with it.
        num_replaced: places of it that are no UTF-8 and read as U+FFFD.
        place: file, and line where it is one.
    """

    text: str | bytes
    is_end: bool
    num_replaced: int
    place: str


def texts_of(part: Part, *, key: str, keep_bytes: bool) -> Iterator[Text]:
    """The texts of `part`.

    Args:
        part: of a file.
        key: of the text in a line's JSON object.
        keep_bytes: whether the bytes of a text file stay as they are.

    Raises:
        DataError: a line is no JSON object with a text under `key`.
    """
    if part.file.is_lines:
        for line, data in enumerate(part.data.split(b"\n"), part.line):
            if data.strip():
                yield _of_line(data, key, part, line)
    elif keep_bytes:
        yield Text(part.data, part.is_end, 0, str(part.file.path))
    else:
        text, num_replaced = _decoded(part.data)
        yield Text(text, part.is_end, num_replaced, str(part.file.path))


def _of_line(data: bytes, key: str, part: Part, line: int) -> Text:
    data = data.removeprefix(_BYTE_ORDER_MARK) if line == 1 else data
    text, num_replaced = _decoded(data)
    place = f"{part.file.path}:{line}"
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place} is no JSON\n"
            "  rule jsonl: every line is a JSON object with the text of a document\n"
            f"      {error}: {_shown(text)}\n"
            "  repair: mend the line or leave it out; --format=text takes a file that is plain text"
        ) from error
    value = document.get(key) if isinstance(document, dict) else None
    if not isinstance(value, str):
        keys = f"; its keys: {', '.join(document)}" if isinstance(document, dict) else ""
        raise DataError(
            f"{place} has no text under {key!r}\n"
            "  rule jsonl: every line is a JSON object with the text of a document\n"
            f"      found {_shown(text)}{keys}\n"
            "  repair: name the key of the text with --jsonl_key, or mend the line"
        )
    text, num_lone = _without_surrogates(value)
    return Text(text, True, num_replaced + num_lone, place)


def _decoded(data: bytes) -> tuple[str, int]:
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text, text.count(REPLACEMENT) - data.count(REPLACEMENT.encode())


def _without_surrogates(text: str) -> tuple[str, int]:
    r"""`text` with U+FFFD for halves of characters, which JSON can spell, as "\ud800", and UTF-8 cannot."""
    try:
        text.encode()
        return text, 0
    except UnicodeEncodeError:
        mended = "".join(REPLACEMENT if "\ud800" <= letter <= "\udfff" else letter for letter in text)
        return mended, mended.count(REPLACEMENT) - text.count(REPLACEMENT)


def _shown(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."
