"""Writes tokens to PREFIX.bin and PREFIX.idx, document by document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import BinaryIO

import numpy as np

from jaxpipe.data.indexed import (
    DTYPES,
    END,
    HEADER,
    LENGTH,
    LOSS,
    MAGIC,
    POINTER,
    VERSION,
    dtype_code,
    index_path,
    tokens_path,
)
from jaxpipe.errors import DataError
from jaxpipe.files import local_path, whole_files

MAX_LENGTH = np.iinfo(LENGTH).max  # tokens of a sequence; a longer document has several sequences
_BLOCK = 64  # arrays of lengths, one from each call of `add`, that are joined before they are written


class IndexedWriter:
    """Writes tokens in Megatron-LM's indexed format; made by `write_indexed`.

    Keeps 8 bytes a document in memory; tokens are written at once.
    """

    def __init__(self, file: BinaryIO, *, vocab_size: int, code: int | None = None, loss: IndexedWriter | None = None):
        self._file = file
        self._vocab_size = vocab_size
        self._code = dtype_code(vocab_size) if code is None else code
        self._loss = loss
        # Number of them that are learned; None: all are, and nothing is written of it.
        self.num_learned = None if loss is None else 0
        self._open_tokens = 0  # of the document that has begun but not ended
        self._lengths: list[np.ndarray] = []
        self._num_sequences: list[np.ndarray] = []  # of each document
        self.num_tokens = 0  # number of tokens written so far

    @property
    def num_documents(self) -> int:
        """Number of documents that have ended."""
        return sum(map(len, self._num_sequences))

    @property
    def dtype(self) -> np.dtype:
        """The integer type of a token in the file."""
        return DTYPES[self._code]

    def add(
        self,
        tokens: np.ndarray,
        lengths: np.ndarray | None = None,
        *,
        is_open: bool = False,
        learned: np.ndarray | None = None,
    ) -> None:
        """Writes documents.

        Args:
            tokens: "tokens", integers, all documents concatenated.
            lengths: "document", tokens of each, all of `tokens` together; None for one document.
            is_open: whether the last document continues with the tokens that are added next.
            learned: for each token 1 if it is learned, else 0; if and only if `num_learned` counts them.

        Raises:
            DataError: a token is not in the vocabulary.
        """
        lengths = np.array([len(tokens)] if lengths is None else lengths, np.int64)
        assert lengths.sum() == len(tokens)
        assert (learned is None) == (self._loss is None)
        if self._loss is not None and learned is not None and self.num_learned is not None:
            # A copy: the lengths are changed below, once for each writer.
            self._loss.add(learned, lengths.copy(), is_open=is_open)
            self.num_learned += int(learned.sum())
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._vocab_size:
            raise DataError(
                f"tokens from {tokens.min()} to {tokens.max()}",
                rule="vocabulary: every token is in the vocabulary",
                picture=f"vocab_size={self._vocab_size}",
                repair="give the size of the vocabulary that the tokens come from",
            )
        self._file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.num_tokens += len(tokens)
        if not len(lengths):
            return
        # The first document may have begun in an earlier call.
        lengths[0] += self._open_tokens
        self._open_tokens = int(lengths[-1]) if is_open else 0
        self._end(lengths[:-1] if is_open else lengths)

    def _end(self, documents: np.ndarray) -> None:
        """Notes the lengths of `documents` "document", each cut into sequences of at most MAX_LENGTH tokens."""
        # At least one sequence also for a document without tokens, since document ends count sequences.
        num_sequences = np.maximum(1, -(-documents // MAX_LENGTH))
        lengths = np.full(num_sequences.sum(), MAX_LENGTH)
        # - 1: the last sequence of each document has what the full ones leave.
        lengths[np.cumsum(num_sequences) - 1] = documents - (num_sequences - 1) * MAX_LENGTH
        self._lengths.append(lengths.astype(LENGTH))
        self._num_sequences.append(num_sequences.astype(np.int32))

    def write_index(self, file: BinaryIO) -> None:
        """Writes PREFIX.idx to `file`; an open document ends here."""
        if self._open_tokens:
            self._end(np.array([self._open_tokens]))
            self._open_tokens = 0
        num_documents = self.num_documents
        num_sequences = sum(map(len, self._lengths))
        # + 1: the 0 before the first end.
        file.write(HEADER.pack(MAGIC, VERSION, self._code, num_sequences, num_documents + 1))
        for lengths in _blocks(self._lengths):
            file.write(lengths.data)
        first_byte = 0
        for lengths in _blocks(self._lengths):
            # int64 before the product: bytes are more than int32 counts.
            ends = first_byte + np.cumsum(lengths, dtype=POINTER) * self.dtype.itemsize
            file.write((ends - lengths.astype(POINTER) * self.dtype.itemsize).data)
            first_byte = ends[-1]
        end = np.zeros(1, END)
        file.write(end.data)
        for num_sequences in _blocks(self._num_sequences):
            ends = end[-1] + np.cumsum(num_sequences, dtype=END)
            file.write(ends.data)
            end = ends


@contextmanager
def write_indexed(
    prefix: str, *, vocab_size: int, beside: Mapping[str, bytes] | None = None, has_loss: bool = False
) -> Iterator[IndexedWriter]:
    """Yields a writer of PREFIX.bin and PREFIX.idx, which appear when the block ends without an error.

    Args:
        prefix: path of both without their endings; existing files are replaced.
        vocab_size: every token is less; determines the dtype.
        beside: contents of other files of the same prefix by their endings, for example ".tokenizer.json".
        has_loss: whether it is also written which tokens are learned, to PREFIX.loss.bin and PREFIX.loss.idx.

    Raises:
        DataError: a file cannot be written, or a token is not in the vocabulary; then no file is left.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with write_indexed(f"{folder}/text", vocab_size=256) as writer:
        ...         writer.add(np.array([4, 5, 6]))
        ...         writer.add(np.array([7, 8, 9]), lengths=np.array([1, 2]))
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['text.bin', 'text.idx']
    """
    others = {local_path(f"{prefix}{suffix}"): content for suffix, content in (beside or {}).items()}
    loss_paths = [tokens_path(f"{prefix}{LOSS}"), index_path(f"{prefix}{LOSS}")] if has_loss else []
    # The index last: without it nothing is read, so a file that is there has all its companions.
    paths = [tokens_path(prefix), *loss_paths, *others, index_path(prefix)]
    try:
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        with whole_files(paths) as (tokens, *rest):
            loss, rest = (IndexedWriter(rest[0], vocab_size=2, code=1), rest[1:]) if has_loss else (None, rest)
            writer = IndexedWriter(tokens, vocab_size=vocab_size, loss=loss)
            yield writer
            if loss is not None:
                loss.write_index(rest.pop(0))
            # The index stays, as the last of `rest`.
            for file, content in zip(rest, [*others.values()], strict=False):
                file.write(content)
            writer.write_index(rest[-1])
    except OSError as error:
        raise DataError(
            f"{paths[0]} cannot be written",
            rule="output-files: the folder can be made and written to, and has room for all files",
            picture=f"{error.filename or 'while writing'}: {error.strerror}",
            repair="free space, get permission to write there, or name another place",
        ) from error


def _blocks(arrays: list[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the numbers of `arrays` in fewer and longer ones, since small files give short ones."""
    for start in range(0, len(arrays), _BLOCK):
        yield np.concatenate(arrays[start : start + _BLOCK])
