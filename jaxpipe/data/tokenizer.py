"""From text to tokens and back, for whatever `data.tokenizer` names.

Goes in: "byte", or where a tokenizer.json lies. Comes out: a `Tokenizer`. Left to others: which text (`corpus`), and
how bytes (`byte_tokenizer`) and vocabularies of Hugging Face (`huggingface_tokenizer`) are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from jaxpipe.data.byte_tokenizer import ByteTokenizer
from jaxpipe.data.huggingface_tokenizer import read_tokenizer
from jaxpipe.data.masked_vocabulary import MaskedVocabulary

BYTE = "byte"


class Tokenizer(Protocol):
    """What turns text into tokens and back. Tokens are of the smallest type that holds the vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Every token is less."""
        ...

    @property
    def separator(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def masked(self) -> MaskedVocabulary | None:
        """The special tokens of a masked model; None where the tokenizer is not for one."""
        ...

    @property
    def beginning(self) -> tuple[int, ...]:
        """The tokens that stand before a text that a model goes on with: where it was taught so, one."""
        ...

    @property
    def identity(self) -> str:
        """The same of two tokenizers whose tokens mean the same, wherever they come from."""
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """The "tokens" of `text`, no special ones among them: a text that spells one is text."""
        ...

    def encode_documents(self, documents: Iterable[bytes]) -> np.ndarray:
        """The "tokens" of all `documents` in a row, a separator behind each."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special ones by their names."""
        ...


def load_tokenizer(name: str, *, is_masked: bool) -> Tokenizer:
    """The tokenizer of `name`.

    Args:
        name: "byte", or the path of a tokenizer.json, or of a folder that has one.
        is_masked: whether a masked model uses it, which needs special tokens.

    Raises:
        ConfigError: no such file, or it cannot be read, or it lacks special tokens that are needed.
    """
    return ByteTokenizer(is_masked) if name == BYTE else read_tokenizer(name, is_masked=is_masked)
