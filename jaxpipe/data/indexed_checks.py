"""What must hold of PREFIX.bin and PREFIX.idx before a token is read: each rule an error of its own."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from jaxpipe.data.indexed_format import CODES, DTYPES, HEADER, MAGIC, VERSION
from jaxpipe.errors import DataError

_BLOCK = 2**22  # sequences that are checked at a time, so that the memory for it is bounded
_AGAIN = "  repair: write both files again with python -m jaxpipe.prepare, or copy them again from where they are whole"


def check_files(prefix: str, tokens_file: Path, index_file: Path) -> None:
    """Raises DataError where one of the two is no file or is empty."""
    for path in (tokens_file, index_file):
        if not path.is_file():
            without = re.sub(r"\.(bin|idx)$", "", prefix)
            hint = f"write indexed:{without}" if without != prefix else "name a prefix of which both files exist"
            raise DataError(
                f"no file {path}\n"
                "  rule indexed-files: tokens are PREFIX.bin and PREFIX.idx, and PREFIX is what is named\n"
                f"      PREFIX={prefix}, looked from {Path.cwd()}\n"
                f"  repair: {hint}, or write them with python -m jaxpipe.prepare --output={without}"
            )
        if not path.stat().st_size:
            raise DataError(
                f"{path} is empty\n  rule indexed-tokens: there is at least one token\n      found 0 bytes\n{_AGAIN}"
            )


def read_header(header: bytes, path: Path) -> tuple[int, int, int]:
    """The dtype's code, the number of sequences and of document ends in the first bytes of `path`.

    Raises:
        DataError: it is no such file, or one of another version or of no integers, or has no sequences.
    """
    if header[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is no index of tokens\n"
            f"  rule indexed-magic: it begins with {MAGIC!r}\n"
            f"      found {header[: len(MAGIC)]!r}\n"
            f"{_AGAIN}"
        )
    if len(header) < HEADER.size:
        raise _truncated(path, "its header", HEADER.size, len(header))
    _, version, code, num_sequences, num_ends = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(
            f"{path} has version={version}\n"
            f"  rule indexed-version: version {VERSION} of Megatron-LM's indexed format\n"
            f"      found {version}\n"
            f"{_AGAIN}"
        )
    if code not in DTYPES or DTYPES[code].kind == "f":
        integers = ", ".join(f"{known} {name}" for known, name in CODES.items() if DTYPES[known].kind != "f")
        raise DataError(
            f"{path} has tokens of {CODES.get(code, 'an unknown dtype')}, code {code}\n"
            f"  rule indexed-dtype: tokens are integers\n"
            f"      codes: {integers}\n"
            f"{_AGAIN}"
        )
    if not num_sequences:
        raise DataError(
            f"{path} has no sequences\n"
            "  rule indexed-tokens: there is at least one token\n"
            f"      found num_sequences=0, num_document_ends={num_ends}\n"
            f"{_AGAIN}"
        )
    return code, num_sequences, num_ends


def check_index_size(path: Path, needed_bytes: int, num_sequences: int) -> None:
    """Raises DataError where the index is not as long as its own header says."""
    found = path.stat().st_size
    if found < needed_bytes:
        raise _truncated(path, f"an index of {num_sequences} sequences", needed_bytes, found)
    if found == needed_bytes + num_sequences:
        raise DataError(
            f"{path} is the index of multimodal data\n"
            "  rule indexed-text: sequences are text and have no modes\n"
            f"      found {num_sequences} bytes behind the ends of the documents, one for each sequence\n"
            "  repair: name data that Megatron-LM wrote without multimodal=True"
        )
    if found > needed_bytes:
        raise DataError(
            f"{path} is too long\n"
            f"  rule indexed-size: an index of {num_sequences} sequences is as long as its header says\n"
            f"      needed {needed_bytes} bytes\n"
            f"      found  {found} bytes\n"
            f"{_AGAIN}"
        )


def check_sequences(path: Path, lengths: np.ndarray, pointers: np.ndarray, dtype: np.dtype) -> int:
    """The number of tokens of sequences that stand one after the other, without gaps.

    Args:
        path: of the index.
        lengths: "sequence", tokens of each.
        pointers: "sequence", first byte of each.
        dtype: of a token.

    Raises:
        DataError: a length is negative, a sequence stands elsewhere, or there are no tokens.
    """
    num_tokens = 0
    for start in range(0, len(lengths), _BLOCK):
        block = lengths[start : start + _BLOCK].astype(np.int64)
        ends = num_tokens + np.cumsum(block)
        is_wrong = (block < 0) | (pointers[start : start + _BLOCK] != (ends - block) * dtype.itemsize)
        if is_wrong.any():
            first = int(np.argmax(is_wrong))
            raise DataError(
                f"{path}: sequence {start + first} is not where the one before it ends\n"
                "  rule indexed-contiguous: sequences stand one after the other in the .bin, without gaps\n"
                f"      needed byte {int(ends[first] - block[first]) * dtype.itemsize}, length 0 or more\n"
                f"      found  byte {int(pointers[start + first])}, length {int(block[first])}\n"
                f"{_AGAIN}"
            )
        num_tokens = int(ends[-1])
    if not num_tokens:
        raise DataError(
            f"{path} has no tokens\n"
            "  rule indexed-tokens: there is at least one token\n"
            f"      found {len(lengths)} sequences, all empty\n"
            f"{_AGAIN}"
        )
    return num_tokens


def check_documents(path: Path, documents: np.ndarray, num_sequences: int) -> None:
    """Raises DataError where the ends of documents do not go up from 0 to the number of sequences."""
    is_whole = len(documents) > 1 and documents[0] == 0 and documents[-1] == num_sequences
    # Neighbouring blocks share an end, so that every pair is looked at.
    blocks = (documents[start : start + _BLOCK + 1] for start in range(0, len(documents), _BLOCK))
    if not is_whole or any((block[1:] < block[:-1]).any() for block in blocks):
        shown = ", ".join(str(end) for end in documents[:5])
        raise DataError(
            f"{path}: the ends of its documents do not cover its sequences\n"
            f"  rule indexed-documents: they begin with 0, never go down and end with {num_sequences}\n"
            f"      found {shown}{', ...' if len(documents) > 5 else ''}, and last {documents[-1:].tolist()}\n"
            f"{_AGAIN}"
        )


def check_tokens_size(path: Path, num_tokens: int, dtype: np.dtype) -> None:
    """Raises DataError where the tokens' file is shorter or longer than its index says."""
    needed, found = num_tokens * dtype.itemsize, path.stat().st_size
    if needed != found:
        raise DataError(
            f"{path} is {'shorter' if found < needed else 'longer'} than its index says\n"
            f"  rule indexed-size: {num_tokens} tokens of {dtype.name} take {needed} bytes\n"
            f"      needed {needed} bytes\n"
            f"      found  {found} bytes\n"
            f"{_AGAIN}"
        )


def _truncated(path: Path, what: str, needed_bytes: int, found_bytes: int) -> DataError:
    return DataError(
        f"{path} ends too early\n"
        f"  rule indexed-size: {what} takes {needed_bytes} bytes\n"
        f"      needed {needed_bytes} bytes\n"
        f"      found  {found_bytes} bytes\n"
        f"{_AGAIN}"
    )
