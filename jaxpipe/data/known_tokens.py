"""Whether the model has a word for every token of a file: seen as they are read, since files may be of any size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.data.blocks import Tokens
from jaxpipe.errors import DataError


@dataclass(frozen=True)
class KnownTokens:
    """The tokens of a file, each in 0 .. `vocab_size` - 1.

    Attributes:
        tokens: of the file, of any integer type.
        file: its name, for the message.
        vocab_size: every token is less.
    """

    tokens: Tokens
    file: str
    vocab_size: int

    def __len__(self) -> int:
        """Tokens in the file."""
        return len(self.tokens)

    def __getitem__(self, places: np.ndarray, /) -> np.ndarray:
        """The tokens at `places`, of the same shape.

        Raises:
            DataError: one of them is no word.
        """
        tokens = self.tokens[places]
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise self._unknown(places, tokens)
        return tokens

    def _unknown(self, places: np.ndarray, tokens: np.ndarray) -> DataError:
        first = np.flatnonzero((tokens < 0) | (tokens >= self.vocab_size))[0]
        return DataError(
            f"{self.file}: token {tokens.flat[first]} at place {places.flat[first]} is no word\n"
            "  rule known-tokens: every token of a file is a word of the vocabulary\n"
            f"      vocab_size={self.vocab_size}: words 0 .. {self.vocab_size - 1}\n"
            "  repair: set data.tokenizer to the one that the file was prepared with, and model.vocab_size for it"
        )
