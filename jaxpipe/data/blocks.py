"""A row of tokens in two parts, to train on and held out, without a copy of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

BLOCK_TOKENS = 65536  # the held-out part is every k-th block of this many tokens, or smaller for short text


class Tokens(Protocol):
    """A row of tokens that is read where it is asked for; a NumPy array is one."""

    def __len__(self) -> int:
        """Tokens in the row."""
        ...

    def __getitem__(self, places: np.ndarray, /) -> np.ndarray:
        """The tokens at `places`, of the same shape."""
        ...


@dataclass(frozen=True)
class Blocks:
    """Of a row of tokens every `every`-th block, or all others, one behind the other.

        every=3      | 0 | 1 | 2 | 3 | 4 | 5 | 6 |
        train          0   1       3   4       6
        held out               2           5

    Attributes:
        tokens: the whole row; what is not asked for is not read.
        num_block: tokens of a block; the last one of the row may have fewer.
        every: of so many blocks the last one is held out, at least 2.
        is_heldout: which of the two parts this is.
    """

    tokens: Tokens
    num_block: int
    every: int
    is_heldout: bool

    def __len__(self) -> int:
        """Tokens of this part."""
        num_full, rest = divmod(len(self.tokens), self.num_block * self.every)
        in_rest = max(0, rest - self._num_train)
        num_heldout = num_full * self.num_block + in_rest
        return num_heldout if self.is_heldout else len(self.tokens) - num_heldout

    def __getitem__(self, places: np.ndarray, /) -> np.ndarray:
        """The tokens at `places` of this part, of the same shape."""
        run = self.num_block if self.is_heldout else self._num_train
        skipped = self._num_train if self.is_heldout else self.num_block
        return self.tokens[places + (places // run + self.is_heldout) * skipped]

    @property
    def _num_train(self) -> int:
        """Tokens to train on between two held-out blocks."""
        return self.num_block * (self.every - 1)


def split(tokens: Tokens, *, every: int) -> tuple[Blocks, Blocks]:
    """`tokens` without every `every`-th block, and those blocks.

    Blocks are spread over the text, so both parts hold the same kinds of documents.
    """
    num_block = min(BLOCK_TOKENS, len(tokens) // every)
    return Blocks(tokens, num_block, every, is_heldout=False), Blocks(tokens, num_block, every, is_heldout=True)
