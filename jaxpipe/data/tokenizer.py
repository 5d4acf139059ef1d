"""The tokenizer that `data.tokenizer` names, and the one of bytes, which needs no vocabulary.

Goes in: "byte", or the path of a tokenizer.json. Comes out: a `Tokenizer`. Left to others: which text is tokenized
(`corpus`), and the vocabulary of a tokenizer.json (`huggingface_tokenizer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.data.huggingface_tokenizer import read_tokenizer
from jaxpipe.data.protocols import MaskedVocabulary, Tokenizer

BYTE = "byte"

NUM_BYTES = 256
END = 0  # a NUL byte ends every document; text does not contain it
SPECIAL = (b"[PAD]", b"[CLS]", b"[SEP]", b"[MASK]")  # follow the bytes, for masked models
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def load_tokenizer(name: str, *, is_masked: bool) -> Tokenizer:
    """Returns the tokenizer of `name`.

    Args:
        name: "byte", or the path of a tokenizer.json, or of a folder that contains one.
        is_masked: whether a masked model uses it, which needs special tokens.

    Raises:
        ConfigError: the file does not exist, cannot be read, or lacks the special tokens.
    """
    return ByteTokenizer(is_masked) if name == BYTE else read_tokenizer(name, is_masked=is_masked)


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose tokens are bytes; for masked models it has four additional special tokens.

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
        """Number of tokens: 256, or 260 for masked models."""
        return NUM_BYTES + len(SPECIAL) * self.is_masked

    @property
    def separator(self) -> int:
        """The NUL byte, which ends a document."""
        return END

    @property
    def masked(self) -> MaskedVocabulary | None:
        """The special tokens of a masked model, which may mask all bytes; None for a causal one."""
        if not self.is_masked:
            return None
        special = range(NUM_BYTES, self.vocab_size)
        return MaskedVocabulary(*special, is_maskable=np.arange(self.vocab_size) < NUM_BYTES)

    @property
    def beginning(self) -> tuple[int, ...]:
        """The empty tuple: a prompt begins with its own first byte."""
        return ()

    @property
    def identity(self) -> str:
        """The name "byte"."""
        return BYTE

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the bytes of `text`; characters are encoded as UTF-8."""
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, np.uint8).astype(np.min_scalar_type(self.vocab_size - 1))

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the bytes of each of `texts`."""
        return [self.encode(text) for text in texts]

    @property
    def special_names(self) -> tuple[str, ...]:
        """The empty tuple: no text is written with special tokens."""
        return ()

    def encode_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns the bytes of each of `texts`, and the character that each belongs to."""
        sizes = [[len(letter.encode()) for letter in text] for text in texts]
        return [
            (self.encode(text), np.repeat(np.arange(len(text)), size)) for text, size in zip(texts, sizes, strict=True)
        ]

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the bytes of each of `documents`, with a NUL byte after them."""
        for document in documents:
            yield self.encode(document + bytes([END]))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`: invalid UTF-8 and unknown tokens as U+FFFD, special tokens by their names."""
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < NUM_BYTES:
            return bytes([token])
        return SPECIAL[token - NUM_BYTES] if NUM_BYTES <= token < self.vocab_size else UNKNOWN
