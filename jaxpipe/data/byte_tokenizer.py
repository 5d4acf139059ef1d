"""The tokenizer of bytes, which needs no vocabulary and no file.

Goes in: any text. Comes out: its bytes in UTF-8, as a `Tokenizer`; a masked model has four special tokens besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.data.protocols import MaskedVocabulary, Tokenizer

BYTE = "byte"
NUM_BYTES = 256
END_BYTE = 0  # a NUL byte ends every document; text does not contain it
SPECIAL = (b"[PAD]", b"[CLS]", b"[SEP]", b"[MASK]")  # follow the bytes, for masked models
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


@dataclass(frozen=True)
class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens are bytes; for masked models it has four additional special tokens.

    Example:
        >>> tokenizer = ByteTokenizer(is_masked=False)
        >>> tokenizer.encode("é!")
        array([195, 169,  33], dtype=uint8)
        >>> tokenizer.decode([195, 169, 33])
        'é!'
    """

    is_masked: bool  # whether a masked model uses it

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 256, or 260 for masked models."""
        return NUM_BYTES + len(SPECIAL) * self.is_masked

    @property
    def separator(self) -> int:
        """The NUL byte, which ends a document."""
        return END_BYTE

    @property
    def missing(self) -> tuple[str, ...]:
        """The empty tuple."""
        return ()

    @property
    def separator_from(self) -> str:
        """Text that says what bytes end a document."""
        return "a NUL byte"

    @property
    def masked(self) -> MaskedVocabulary | None:
        """The special tokens of a masked model, which may mask all bytes; None for a causal one."""
        if not self.is_masked:
            return None
        special = range(NUM_BYTES, self.vocab_size)
        return MaskedVocabulary(*special, is_maskable=np.arange(self.vocab_size) < NUM_BYTES)

    @property
    def identity(self) -> str:
        """The name "byte"."""
        return BYTE

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the bytes of `text`; characters are encoded as UTF-8."""
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, np.uint8).astype(np.min_scalar_type(self.vocab_size - 1))

    def encode_places(
        self, texts: Sequence[str], reads_special: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns the bytes of each of `texts`, the character that each belongs to, and the one after it."""
        results = []
        for text in texts:
            # Four bytes for each character, so that an index counts characters.
            letters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            sizes = 1 + (letters[:, None] >= [0x80, 0x800, 0x10000]).sum(axis=1)  # in UTF-8
            place = np.repeat(np.arange(len(text)), sizes)
            results.append((self.encode(text), place, place + 1))
        return results

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the bytes of each of `documents`, with a NUL byte after them."""
        for document in documents:
            yield self.encode(document + bytes([END_BYTE]))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`: invalid UTF-8 and unknown tokens as U+FFFD, special tokens by their names."""
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < NUM_BYTES:
            return bytes([token])
        return SPECIAL[token - NUM_BYTES] if NUM_BYTES <= token < self.vocab_size else UNKNOWN
