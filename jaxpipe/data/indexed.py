"""Tokens that lie prepared on a disk, in Megatron-LM's indexed format, read without copying them to memory.

Goes in: a prefix, of files that `jaxpipe.prepare` or Megatron-LM wrote. Comes out: all tokens as one row, mapped to
memory. Left to others: the format (`indexed_format`), writing it (`indexed_writer`), cutting the row into sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxpipe.data import indexed_checks as checks
from jaxpipe.data.indexed_format import DTYPES, END, HEADER, LENGTH, POINTER, index_path, tokens_path


@dataclass(frozen=True, eq=False)
class IndexedTokens:
    """The tokens of PREFIX.bin and PREFIX.idx.

    Attributes:
        prefix: of both files.
        tokens: "tokens", mapped to memory: all documents one after the other.
        lengths: "sequence", int32, tokens of each sequence; a document of Megatron-LM has one or more.
        documents: "documents + 1", int64: 0 and the end of each document, counted in sequences.
    """

    prefix: str
    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray

    @classmethod
    def open(cls, prefix: str) -> IndexedTokens:
        """The tokens of `prefix`, checked: what the index says agrees with itself and with the tokens' file.

        Reads the whole index once, 12 bytes a sequence and 8 a document, and of the tokens nothing.

        Raises:
            DataError: a file is not there, is damaged, or holds no tokens.
        """
        tokens_file, index_file = tokens_path(prefix), index_path(prefix)
        checks.check_files(prefix, tokens_file, index_file)
        with index_file.open("rb") as file:
            header = checks.read_header(file.read(HEADER.size), index_file)
        code, num_sequences, num_ends = header
        dtype = DTYPES[code]
        first_pointer = HEADER.size + LENGTH.itemsize * num_sequences
        first_end = first_pointer + POINTER.itemsize * num_sequences
        checks.check_index_size(index_file, first_end + END.itemsize * num_ends, num_sequences)
        lengths = _mapped(index_file, LENGTH, HEADER.size, num_sequences)
        pointers = _mapped(index_file, POINTER, first_pointer, num_sequences)
        documents = _mapped(index_file, END, first_end, num_ends)
        num_tokens = checks.check_sequences(index_file, lengths, pointers, dtype)
        checks.check_documents(index_file, documents, num_sequences)
        checks.check_tokens_size(tokens_file, num_tokens, dtype)
        return cls(prefix, _mapped(tokens_file, dtype, 0, num_tokens), lengths, documents)

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Documents, empty ones too."""
        return len(self.documents) - 1

    @property
    def dtype(self) -> np.dtype:
        """Of a token: an integer."""
        return self.tokens.dtype

    def __reduce__(self) -> tuple:
        """Another process gets the prefix, not the tokens."""
        return IndexedTokens.open, (self.prefix,)


def _mapped(path: Path, dtype: np.dtype, first_byte: int, num: int) -> np.ndarray:
    return np.memmap(path, dtype, mode="r", offset=first_byte, shape=(num,))
