"""Files to parts of a few megabytes, so that neither a file nor a document need fit into memory.

A document of text that is longer is cut at the end of a line, where a word ends by GPT-2's rule: the tokens of such a
vocabulary are those of the whole. A tokenizer that puts something before every text, as SentencePiece does a space,
puts it there too. Where no line ends in 64 KiB the cut is at a space; where there is none, between two characters.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO, cast

from jaxpipe.errors import DataError
from jaxpipe.prepare.input_files import InputFile

PART_BYTES = 2**22
_TAIL_BYTES = 2**16
_CUTS = (re.compile(rb"[!-~](?=[\r\n])"), re.compile(rb"[!-~](?=[ \t])"), re.compile(rb"[\x80-\xff](?=[ \t\r\n])"))


@dataclass(frozen=True)
class Part:
    """A stretch of a file.

    Attributes:
        file: where it comes from.
        data: text, or whole lines.
        line: of the file that it begins with, from 1; of text always 1.
        is_end: whether the document ends with it; true of lines.
        num_read_bytes: of the disk, for it.
    """

    file: InputFile
    data: bytes
    line: int
    is_end: bool
    num_read_bytes: int


def read_parts(files: Sequence[InputFile]) -> Iterator[Part]:
    """All of `files`, in order."""
    for file in files:
        yield from read_file(file)


def read_blocks(files: Sequence[InputFile]) -> Iterator[list[Part]]:
    """The same parts, so many at a time as make up about `PART_BYTES`."""
    block, num_bytes = [], 0
    for part in read_parts(files):
        block.append(part)
        num_bytes += len(part.data)
        if num_bytes >= PART_BYTES:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def read_file(file: InputFile, *, start: int = 0) -> Iterator[Part]:
    """The parts of `file`; one without text where it is empty.

    Args:
        file: what is read.
        start: byte to begin at, or rather at the next line; not of compressed files. Lines are counted from there.

    Raises:
        DataError: it cannot be read, or not be unpacked.
    """
    try:
        with file.path.open("rb") as raw:
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if file.is_compressed else raw
            if start:
                stream.seek(start)
                stream.readline()
            position = raw.tell()
            parts = _lines(stream) if file.is_lines else _text(stream)
            for data, line, is_end in parts:
                position, before = raw.tell(), position
                yield Part(file, data, line, is_end, position - before)
    except (OSError, EOFError, zlib.error) as error:  # gzip's own error is an OSError
        raise DataError(
            f"{file.path} cannot be read\n"
            f"  rule input-readable: every file can be read{' and unpacked' * file.is_compressed} to its end\n"
            f"      {getattr(error, 'strerror', None) or error}\n"
            "  repair: make it readable, copy it again from where it is whole, or name other files"
        ) from error


def _lines(stream: BinaryIO) -> Iterator[tuple[bytes, int, bool]]:
    line = 1
    begun: list[bytes] = []  # pieces of a line that has not ended
    while data := stream.read(PART_BYTES):
        cut = data.rfind(b"\n") + 1
        if not cut:
            begun.append(data)
            continue
        whole = b"".join([*begun, data[:cut]])
        begun = [data[cut:]]
        yield whole, line, True
        line += whole.count(b"\n")
    if line == 1 or any(begun):
        yield b"".join(begun), line, True


def _text(stream: BinaryIO) -> Iterator[tuple[bytes, int, bool]]:
    data = stream.read(PART_BYTES)
    while more := stream.read(PART_BYTES):
        cut = _cut(data)
        yield data[:cut], 1, False
        data = data[cut:] + more
    yield data, 1, True


def _cut(data: bytes) -> int:
    """Where to cut `data`, which goes on: past its first byte."""
    tail = max(1, len(data) - _TAIL_BYTES)
    for pattern in _CUTS:
        ends = [match.end() for match in pattern.finditer(data, tail)]
        if ends:
            return ends[-1]
    # The last character may be whole or not, so the cut is before it.
    end = len(data) - 1
    while end > len(data) - 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end
