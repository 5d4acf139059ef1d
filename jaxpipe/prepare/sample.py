"""A part of the text that stands for all of it, to train a vocabulary on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from jaxpipe.errors import DataError
from jaxpipe.prepare.input_files import InputFile
from jaxpipe.prepare.reading import Part, read_file, read_parts
from jaxpipe.prepare.texts import texts_of

SAMPLE_BYTES = 2**26
STRETCH_BYTES = 2**20


def sample_texts(files: Sequence[InputFile], *, key: str) -> Iterator[str]:
    """All texts where `files` have at most `SAMPLE_BYTES`; else those of stretches evenly spread over them.

    A compressed file is read from its beginning. What a sample finds damaged it leaves out, but for its first
    stretch: who prepares all of it names the line.

    Args:
        files: in order.
        key: of the text in a line's JSON object.

    Raises:
        DataError: a line of the first stretch holds no document, or a file cannot be read.
    """
    num_bytes = sum(file.num_bytes for file in files)
    if num_bytes <= SAMPLE_BYTES:
        for part in read_parts(files):
            yield from _texts(part, key)
        return
    num_stretches = max(1, SAMPLE_BYTES // STRETCH_BYTES)
    for stretch in range(num_stretches):
        for part in _stretch(files, num_bytes * stretch // num_stretches):
            try:
                yield from _texts(part, key)
            except DataError:
                if stretch == 0:
                    raise


def _texts(part: Part, key: str) -> Iterator[str]:
    return (str(text.text) for text in texts_of(part, key=key, keep_bytes=False) if text.text)


def _stretch(files: Sequence[InputFile], position: int) -> Iterator[Part]:
    """Parts from byte `position` on, counted over all files; into the next ones, until they make up a stretch."""
    starts = [0, *accumulate(file.num_bytes for file in files)]
    index = min(bisect_right(starts, position) - 1, len(files) - 1)
    left = STRETCH_BYTES
    for file in files[index:]:
        start = position - starts[index] if file is files[index] and not file.is_compressed else 0
        for part in read_file(file, start=start):
            cut = part.data[:left].rfind(b"\n") + 1 if len(part.data) > left else len(part.data)
            yield Part(file, part.data[:cut], part.line, part.is_end, 0)
            left -= len(part.data)
            if left <= 0:
                return
