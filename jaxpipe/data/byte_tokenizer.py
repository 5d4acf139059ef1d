"""Tokens that are bytes: every text has them, and no vocabulary is to be had first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jaxpipe.data.masked_vocabulary import MaskedVocabulary

NUM_BYTES = 256
END = 0  # a NUL byte ends every document; text does not contain it
SPECIAL = (b"[PAD]", b"[CLS]", b"[SEP]", b"[MASK]")  # behind the bytes, for masked models
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte; masked models have four special tokens more.

    Attributes:
        is_masked: whether a masked model uses it.

    Example:
        >>> tokenizer = ByteTokenizer(is_masked=False)
        >>> tokenizer.encode("é!")
        array([195, 169,  33], dtype=uint8)
        >>> tokenizer.decode([195, 169, 33])
        'é!'
    """

    is_masked: bool

    @property
    def vocab_size(self) -> int:
        """256, or 260 for masked models."""
        return NUM_BYTES + len(SPECIAL) * self.is_masked

    @property
    def separator(self) -> int:
        """The NUL byte."""
        return END

    @property
    def masked(self) -> MaskedVocabulary | None:
        """Of a masked model: all bytes are words."""
        if not self.is_masked:
            return None
        special = range(NUM_BYTES, self.vocab_size)
        return MaskedVocabulary(*special, is_word=np.arange(self.vocab_size) < NUM_BYTES)

    @property
    def beginning(self) -> tuple[int, ...]:
        """None."""
        return ()

    @property
    def identity(self) -> str:
        """Its name."""
        return "byte"

    def encode(self, text: str | bytes) -> np.ndarray:
        """The bytes of `text`, in UTF-8 where it is no bytes yet."""
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, np.uint8).astype(np.min_scalar_type(self.vocab_size - 1))

    def encode_documents(self, documents: Iterable[bytes]) -> np.ndarray:
        """The bytes of all `documents`, a NUL byte behind each."""
        return self.encode(b"".join(part for document in documents for part in (document, bytes([END]))))

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of these bytes; what is no UTF-8 and no token reads as U+FFFD, a special token as its name."""
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < NUM_BYTES:
            return bytes([token])
        return SPECIAL[token - NUM_BYTES] if NUM_BYTES <= token < self.vocab_size else UNKNOWN
