"""Finds the input files and reads them in parts of a few megabytes; no file or text need fit into memory.

A longer document of text is cut at the end of a line, where GPT-2's rule ends a word: a vocabulary that cuts text by
that rule gives the same tokens as for the whole document. A tokenizer that puts something before every text, as
SentencePiece puts a space, also puts it before each part. Where no line ends in 64 KiB the cut is at a space; where
there is none, between two characters.
"""

from __future__ import annotations

import errno
import glob
import gzip
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from jaxpipe.data.huggingface_tokenizer import groups
from jaxpipe.data.prepare.chat import CHAT
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.files import local_path

COMPRESSED = ".gz"
JSON_LINES = (".jsonl", ".json")
FORMATS = ("auto", "text", "jsonl", CHAT)

PART_BYTES = 2**22
MOST_LINE_BYTES = 2**28
BLOCK_BYTES = 2**24  # encoded at a time: some parts for every core, and their tokens fit into memory
_TAIL_BYTES = 2**16
# Ends of words, the best first: before a line's end, before a space, and behind letters that are not ASCII.
_CUTS = (re.compile(rb"[!-~](?=[\r\n])"), re.compile(rb"[!-~](?=[ \t])"), re.compile(rb"[\x80-\xff](?=[ \t\r\n])"))


@dataclass(frozen=True)
class InputFile:
    """A file of text."""

    path: Path
    num_bytes: int  # size on the disk
    is_jsonl: bool  # whether each line is a JSON object with a document; else the whole file is one document
    is_compressed: bool


@dataclass(frozen=True)
class FilePart:
    """A part of a file."""

    file: InputFile
    data: bytes  # text, or whole JSON lines
    line: int  # number of its first line in the file, from 1; always 1 for text
    is_end: bool  # whether its last document ends with it; always true for JSON lines
    num_read_bytes: int  # bytes that were read from the disk for it


def find_files(patterns: Sequence[str], *, file_format: str = "auto") -> list[InputFile]:
    """Returns all files that `patterns` name, each once, in order of their paths.

    Args:
        file_format: "text", "jsonl", "chat", which is JSON lines too, or "auto": by the endings .jsonl and .json,
            before .gz if the name has it.

    Raises:
        ConfigError: a pattern names no file.
    """
    paths = {path for pattern in patterns for path in _matching(pattern)}
    return [_input_file(path, file_format) for path in sorted(paths, key=Path.as_posix)]


def read_blocks(files: Sequence[InputFile]) -> Iterator[list[FilePart]]:
    """The parts of all `files`, in order, in blocks of about `BLOCK_BYTES`."""
    parts = (part for file in files for part in read_file(file))
    return groups(parts, BLOCK_BYTES, size=lambda part: len(part.data))


def read_file(file: InputFile, *, start: int = 0) -> Iterator[FilePart]:
    """Yields the parts of `file`; one without text if the file is empty.

    Args:
        start: byte after which the first whole line begins, or a text without lines goes on; 0 for compressed files.
            Lines are counted from there.

    Raises:
        DataError: the file cannot be read or decompressed.
    """
    try:
        with file.path.open("rb") as raw:
            stream = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if file.is_compressed else raw
            # The line in which `start` falls is another stretch's.
            if start:
                stream.seek(start)
                stream.readline(-1 if file.is_jsonl else _TAIL_BYTES)
            # Bytes of the file and not of the stream, which for a compressed file counts what is decompressed.
            position = raw.tell()
            parts = _read_lines(stream) if file.is_jsonl else _read_text(stream)
            for data, line, is_end in parts:
                position, before = raw.tell(), position
                yield FilePart(file, data, line, is_end, position - before)
    except (OSError, EOFError, zlib.error) as error:  # gzip's own error is an OSError
        raise DataError(
            f"{file.path} cannot be read",
            rule=f"input-readable: every file can be read{' and decompressed' * file.is_compressed} to its end",
            picture=str(getattr(error, "strerror", None) or error),
            repair="make it readable, copy it again from where it is whole, or name other files",
        ) from error


def _matching(pattern: str) -> list[Path]:
    path = local_path(pattern)
    paths = [path] if path.is_file() else [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = [file for file in paths if file.is_file()]
    if not files:
        name = f"--input='{pattern.rstrip('/')}/**'" if path.is_dir() else "files that exist"
        raise ConfigError(
            f"--input={pattern} names no file",
            rule="input-files: every --input is a file, or a glob of at least one; ** descends into folders",
            picture=f"current folder: {Path.cwd()}",
            repair=f"name {name}, a glob in quotes so that the shell does not expand it",
        )
    return files


def _input_file(path: Path, file_format: str) -> InputFile:
    is_compressed = path.suffix == COMPRESSED
    suffix = path.with_suffix("").suffix if is_compressed else path.suffix
    is_jsonl = file_format in ("jsonl", CHAT) or (file_format == "auto" and suffix in JSON_LINES)
    return InputFile(path, path.stat().st_size, is_jsonl, is_compressed)


def _read_lines(stream: BinaryIO) -> Iterator[tuple[bytes, int, bool]]:
    """Yields whole lines of about `PART_BYTES`, the number of the first one, and True."""
    line = 1
    begun: list[bytes] = []  # pieces of a line that has not ended
    while data := stream.read(PART_BYTES):
        # + 1: the end of the line is a part of it; 0 if no line ends.
        cut = data.rfind(b"\n") + 1
        if not cut:
            begun.append(data)
            if len(begun) * PART_BYTES > MOST_LINE_BYTES:  # it must fit into memory, as one without an end does not
                raise OSError(errno.EFBIG, f"line {line} has more than {MOST_LINE_BYTES // 2**20} MiB")
            continue
        whole = b"".join([*begun, data[:cut]])
        begun = [data[cut:]]
        yield whole, line, True
        line += whole.count(b"\n")
    # A file without lines gives one empty part, so that it is counted.
    if line == 1 or any(begun):
        yield b"".join(begun), line, True


def _read_text(stream: BinaryIO) -> Iterator[tuple[bytes, int, bool]]:
    """Yields parts of a text of about `PART_BYTES`, the line 1, and whether the text ends."""
    data = stream.read(PART_BYTES)
    while more := stream.read(PART_BYTES):
        cut = place_to_cut(data)
        yield data[:cut], 1, False
        data = data[cut:] + more
    yield data, 1, True


def place_to_cut(data: bytes) -> int:
    """Returns where to cut `data`, which continues: after its first byte."""
    # At least one byte, so that every cut goes on.
    tail = max(1, len(data) - _TAIL_BYTES)
    for pattern in _CUTS:
        ends = [match.end() for match in pattern.finditer(data, tail)]
        if ends:
            return ends[-1]
    # The last character may be incomplete, so the cut is before it.
    end = len(data) - 1
    # A character of UTF-8 has at most three bytes that continue it.
    while end > len(data) - 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end
