r"""Megatron-LM's indexed format of tokens on the disk: checked, and then read where a batch needs them.

Goes in: the prefix of files that `jaxpipe.prepare` or Megatron-LM wrote. Comes out: all tokens as one array in a
file (`stored`). Left to others: writing the format (`indexed_writer`), cutting tokens into sequences.

PREFIX.bin contains only the tokens of all sequences, concatenated. PREFIX.idx is little-endian:

    bytes  type    what
        9          b"MMIDIDX\x00\x00"
        8  uint64  version, 1
        1  uint8   code of the tokens' dtype, a key of DTYPES
        8  uint64  S, the number of sequences
        8  uint64  E, the number of document ends that follow: documents + 1
      4 S  int32   tokens of each sequence
      8 S  int64   first byte of each sequence in PREFIX.bin
      8 E  int64   ends of documents, counted in sequences: 0, the end of the first document, ..., S

PREFIX.loss.bin and PREFIX.loss.idx, if there are any, have the same form: for each token 1 if a model learns to predict
it, 0 if it only reads it. Both are jaxpipe's own; Megatron-LM reads the other two without them.

Multimodal data have S bytes more, a mode for each sequence; jaxpipe does not read these.

Source: class _IndexWriter and class DType in megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpipe.data.stored import StoredArray
from jaxpipe.errors import DataError
from jaxpipe.files import local_path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TOKENIZER = ".tokenizer.json"
LOSS = ".loss"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, code, sequences, document ends
LENGTH = np.dtype("<i4")
POINTER = np.dtype("<i8")
END = np.dtype("<i8")

CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
DTYPES = {code: np.dtype(name).newbyteorder("<") for code, name in CODES.items()}

VOCAB_SIZE_OF_INT32 = 65500  # from this size on Megatron-LM uses int32 instead of uint16


def dtype_code(vocab_size: int) -> int:
    """Returns the code of the dtype that Megatron-LM uses for the tokens of a vocabulary (DType.optimal_dtype).

    Example:
        >>> CODES[dtype_code(50257)], CODES[dtype_code(128256)]
        ('uint16', 'int32')
    """
    name = "uint16" if vocab_size < VOCAB_SIZE_OF_INT32 else "int32"
    return next(code for code, known in CODES.items() if known == name)


def tokens_path(prefix: str) -> Path:
    """Returns the path PREFIX.bin, with `~` expanded."""
    return local_path(f"{prefix}.bin")


def tokenizer_path(prefix: str) -> Path:
    """Returns the path PREFIX.tokenizer.json, with `~` expanded; data of bytes or of Megatron-LM has no such file."""
    return local_path(f"{prefix}{TOKENIZER}")


def index_path(prefix: str) -> Path:
    """Returns the path PREFIX.idx, with `~` expanded."""
    return local_path(f"{prefix}.idx")


BLOCK_SEQUENCES = 2**22  # checked at a time, which bounds the memory
_AGAIN = "write both files again with python -m jaxpipe.prepare, or copy them again from where they are whole"


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """The tokens of PREFIX.bin and PREFIX.idx."""

    prefix: str  # path of both files without their endings
    tokens: StoredArray  # "tokens", in the file: all documents, concatenated
    lengths: StoredArray  # "sequence", int32, tokens of each sequence; a document of Megatron-LM has one or more
    documents: StoredArray  # "document + 1", int64: 0 and the end of each document, counted in sequences

    @classmethod
    def open(cls, prefix: str) -> IndexedTokens:
        """Returns the tokens of `prefix`, after checking the index against itself and against the file of tokens.

        Reads the whole index once, 12 bytes a sequence and 8 a document, and none of the tokens.

        Raises:
            DataError: a file is missing, is damaged, or contains no tokens.
        """
        tokens_file = tokens_path(prefix)
        index_file = index_path(prefix)
        check_files(prefix, tokens_file, index_file)
        # Without a buffer: `StoredArray` reads at positions of its own.
        index = index_file.open("rb", buffering=0)
        code, num_sequences, num_ends = read_header(index.read(HEADER.size), index_file)
        dtype = DTYPES[code]
        first_pointer = HEADER.size + LENGTH.itemsize * num_sequences
        first_end = first_pointer + POINTER.itemsize * num_sequences
        check_index_size(index_file, first_end + END.itemsize * num_ends, num_sequences)
        lengths = StoredArray(index_file, index, LENGTH, HEADER.size, num_sequences)
        pointers = StoredArray(index_file, index, POINTER, first_pointer, num_sequences)
        documents = StoredArray(index_file, index, END, first_end, num_ends)
        num_tokens = check_sequences(index_file, lengths, pointers, dtype)
        check_documents(index_file, documents, num_sequences)
        what = f"a file of {num_tokens} tokens of {dtype.name}, which its index names,"
        _check_size(tokens_file, what, num_tokens * dtype.itemsize, tokens_file.stat().st_size)
        tokens = StoredArray(tokens_file, tokens_file.open("rb", buffering=0), dtype, 0, num_tokens)
        return cls(prefix, tokens, lengths, documents)

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents, empty ones included."""
        return len(self.documents) - 1

    def ends(self) -> np.ndarray:
        """Returns where each document ends, "document", int64, counted in tokens; reads the whole index."""
        # The sum in int64, since a file may have more tokens than int32 counts. [1:]: the first end is the 0.
        return np.concatenate([[0], np.cumsum(self.lengths[:], dtype=np.int64)])[self.documents[1:]]

    @property
    def dtype(self) -> np.dtype:
        """The integer type of a token."""
        return self.tokens.dtype

    def __reduce__(self) -> tuple:
        """Pickles the prefix, not the tokens: another process opens the files again."""
        return IndexedTokens.open, (self.prefix,)


def read_learned(text: IndexedTokens) -> StoredArray | None:
    """Which tokens of `text` are to be learned; None without .loss files, DataError if these are of another text."""
    prefix = f"{text.prefix}{LOSS}"
    if not (tokens_path(prefix).is_file() or index_path(prefix).is_file()):
        return None
    learned = IndexedTokens.open(prefix)
    if learned.num_tokens != text.num_tokens:
        raise _damaged(
            f"{tokens_path(prefix)} is of another text",
            rule="indexed-loss: PREFIX.loss.bin has a number for each token of PREFIX.bin, 1 if it is learned, else 0",
            picture=f"{tokens_path(text.prefix)}: {text.num_tokens} tokens\n"
            f"{tokens_path(prefix)}: {learned.num_tokens}",
            repair="write all files again with python -m jaxpipe.prepare, or remove those of the loss to learn all",
        )
    return learned.tokens


# Every rule about the two files has an error of its own, and all of them hold before a token is read.


def check_files(prefix: str, tokens_file: Path, index_file: Path) -> None:
    """Raises DataError if one of the two files is missing or empty."""
    for path in (tokens_file, index_file):
        if not path.is_file():
            without = re.sub(r"\.(bin|idx)$", "", prefix)
            hint = f"write indexed:{without}" if without != prefix else "name a prefix of which both files exist"
            raise _damaged(
                f"no file {path}",
                rule="indexed-files: tokens are stored in PREFIX.bin and PREFIX.idx; only PREFIX is given",
                picture=f"PREFIX={prefix}; current folder: {Path.cwd()}",
                repair=f"{hint}, or write them with python -m jaxpipe.prepare --output={without}",
            )
        if not path.stat().st_size:
            raise _damaged(
                f"{path} is empty", rule="indexed-tokens: there is at least one token", picture="found 0 bytes"
            )


def read_header(header: bytes, path: Path) -> tuple[int, int, int]:
    """Returns the code of the dtype, the number of sequences and the number of document ends.

    Raises:
        DataError: the file is not an index, has another version or no sequences, or its tokens are not integers.
    """
    if header[: len(MAGIC)] != MAGIC:
        raise _damaged(
            f"{path} is not an index of tokens",
            rule=f"indexed-magic: it begins with {MAGIC!r}",
            picture=f"found {header[: len(MAGIC)]!r}",
        )
    _check_size(path, "its header", HEADER.size, len(header))
    _, version, code, num_sequences, num_ends = HEADER.unpack(header)
    if version != VERSION:
        raise _damaged(
            f"{path} has version={version}",
            rule=f"indexed-version: version {VERSION} of Megatron-LM's indexed format",
            picture=f"found {version}",
        )
    if code not in DTYPES or DTYPES[code].kind == "f":
        integers = ", ".join(f"{known} {name}" for known, name in CODES.items() if DTYPES[known].kind != "f")
        raise _damaged(
            f"{path} has tokens of {CODES.get(code, 'an unknown dtype')}, code {code}",
            rule="indexed-dtype: tokens are integers",
            picture=f"codes: {integers}",
        )
    if not num_sequences:
        raise _damaged(
            f"{path} has no sequences",
            rule="indexed-tokens: there is at least one token",
            picture=f"found num_sequences=0, num_document_ends={num_ends}",
        )
    return code, num_sequences, num_ends


def check_index_size(path: Path, needed_bytes: int, num_sequences: int) -> None:
    """Raises DataError if the index is not as long as its own header says."""
    num_bytes = path.stat().st_size
    # The modes of multimodal data are one byte for each sequence, behind all else.
    if num_bytes == needed_bytes + num_sequences:
        raise _damaged(
            f"{path} is the index of multimodal data",
            rule="indexed-text: sequences are text and have no modes",
            picture=f"found {num_sequences} bytes after the ends of the documents, one for each sequence",
            repair="name data that Megatron-LM wrote without multimodal=True",
        )
    _check_size(path, f"an index of {num_sequences} sequences", needed_bytes, num_bytes)


def check_sequences(path: Path, lengths: StoredArray, pointers: StoredArray, dtype: np.dtype) -> int:
    """Returns the number of tokens of all sequences, which follow each other without gaps.

    Raises:
        DataError: a length is negative, a sequence is at another position, or there are no tokens.
    """
    num_tokens = 0
    for start in range(0, len(lengths), BLOCK_SEQUENCES):
        # int64 for the sums, see `ends`.
        block, begins = (array[start : start + BLOCK_SEQUENCES].astype(np.int64) for array in (lengths, pointers))
        ends = num_tokens + np.cumsum(block)
        is_wrong = (block < 0) | (begins != (ends - block) * dtype.itemsize)
        if is_wrong.any():
            first = int(np.argmax(is_wrong))
            raise _damaged(
                f"{path}: sequence {start + first} is not where the one before it ends",
                rule="indexed-contiguous: sequences follow each other in the .bin, without gaps",
                picture=f"needed byte {int(ends[first] - block[first]) * dtype.itemsize}, length 0 or more\n"
                f"found  byte {int(begins[first])}, length {int(block[first])}",
            )
        num_tokens = int(ends[-1])
    if not num_tokens:
        raise _damaged(
            f"{path} has no tokens",
            rule="indexed-tokens: there is at least one token",
            picture=f"found {len(lengths)} sequences, all empty",
        )
    return num_tokens


def check_documents(path: Path, documents: StoredArray, num_sequences: int) -> None:
    """Raises DataError if the ends of documents do not ascend from 0 to the number of sequences."""
    # Slices: a `StoredArray` takes no single position.
    is_whole = len(documents) > 1 and documents[:1] == 0 and documents[-1:] == num_sequences
    # Neighbouring blocks share an end, so that every pair of ends is compared.
    blocks = (documents[start : start + BLOCK_SEQUENCES + 1] for start in range(0, len(documents), BLOCK_SEQUENCES))
    if not is_whole or any((block[1:] < block[:-1]).any() for block in blocks):
        shown = ", ".join(str(end) for end in documents[:5])
        raise _damaged(
            f"{path}: the ends of its documents do not cover its sequences",
            rule=f"indexed-documents: they begin with 0, never decrease and end with {num_sequences}",
            picture=f"found {shown}{', ...' if len(documents) > 5 else ''}, and last {documents[-1:].tolist()}",
        )


def _check_size(path: Path, what: str, needed_bytes: int, found_bytes: int) -> None:
    if found_bytes != needed_bytes:
        raise _damaged(
            f"{path} {'ends too early' if found_bytes < needed_bytes else 'is too long'}",
            rule=f"indexed-size: {what} takes {needed_bytes} bytes",
            picture=f"needed {needed_bytes} bytes\nfound  {found_bytes} bytes",
        )


def _damaged(what: str, *, rule: str, picture: str, repair: str = _AGAIN) -> DataError:
    return DataError(what, rule=rule, picture=picture, repair=repair)
