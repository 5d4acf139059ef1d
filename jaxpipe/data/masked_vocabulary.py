"""The tokens that a masked language model treats differently from words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class MaskedVocabulary:
    """Ids of the special tokens, and which ids are words.

    Attributes:
        padding: fills a sequence up, [PAD].
        classification: begins a sequence, [CLS].
        separator: ends each of its two segments, [SEP].
        mask: stands for a word that is to be predicted, [MASK].
        is_word: "vocab", bool: which ids are ordinary words: these alone are predicted or put in another's place.
    """

    padding: int
    classification: int
    separator: int
    mask: int
    is_word: np.ndarray

    @cached_property
    def words(self) -> np.ndarray:
        """The ids of the ordinary words, "word"."""
        return np.flatnonzero(self.is_word)
