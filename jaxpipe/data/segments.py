"""The layout of a masked sequence: [CLS] A [SEP] B [SEP] and padding, with segments A and B in order or swapped.

Goes in: random bits, one row for each sequence. Comes out: which token of the sequence's window stands at which
position. Left to others: the tokens themselves, and which of them are masked (`masked`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.data.protocols import MaskedVocabulary
from jaxpipe.data.random_numbers import integers, uniform

NUM_SPECIAL = 3  # [CLS] and two [SEP]
MIN_TOKENS = 2  # one in each segment
NUM_RANDOM = 5  # per sequence: whether it is short, its length if so, its beginning, the cut, whether it is swapped


@dataclass(frozen=True)
class Segments:
    """The lengths and places of the segments of a batch; the text of a sequence is A's tokens, then B's.

    Attributes:
        window: tokens of a window, the longest text.
        num_tokens: "sequence", tokens of the text, A and B together.
        num_first: "sequence", tokens of A.
        is_swapped: "sequence", bool: A follows B in the window.
        begin: "sequence", where in its window the text begins.
    """

    window: int
    num_tokens: np.ndarray
    num_first: np.ndarray
    is_swapped: np.ndarray
    begin: np.ndarray

    def is_text(self) -> np.ndarray:
        """Marks the columns of a text that hold a token, "sequence window", bool; the others follow its last token."""
        return np.arange(self.window) < self.num_tokens[:, None]

    def window_positions(self) -> np.ndarray:
        """Position in its window of each token of a text, "sequence window"; arbitrary after the last token."""
        shift = np.where(self.is_swapped, self.num_tokens - self.num_first, 0)
        return self.begin[:, None] + (np.arange(self.window) + shift[:, None]) % self.num_tokens[:, None]

    def sequence_positions(self) -> np.ndarray:
        """Position in its sequence of each token of a text, "sequence window"; past the end after the last token."""
        text = np.arange(self.window)
        return np.where(self.is_text(), text + 1 + (text >= self.num_first[:, None]), self.window + NUM_SPECIAL)

    def arrange(self, text: np.ndarray, vocabulary: MaskedVocabulary) -> dict[str, np.ndarray]:
        """Returns the arrays "tokens", "token_types" and "padding_mask", each "sequence seq", int32.

        Args:
            text: "sequence window", the tokens; those after the end of a text are ignored.
            vocabulary: gives the special tokens.
        """
        rows, position = np.arange(len(text)), np.arange(self.window + NUM_SPECIAL)
        # An extra column takes the tokens that have no position.
        tokens = np.full((len(text), len(position) + 1), vocabulary.padding, np.int32)
        np.put_along_axis(tokens, self.sequence_positions(), text, axis=1)
        tokens[:, 0] = vocabulary.classification
        tokens[rows, self.num_first + 1] = vocabulary.separator
        tokens[rows, self.num_tokens + 2] = vocabulary.separator
        is_token = position < self.num_tokens[:, None] + NUM_SPECIAL
        is_second = position > self.num_first[:, None] + 1
        return {
            "tokens": tokens[:, :-1],
            "token_types": (is_token & is_second).astype(np.int32),
            "padding_mask": is_token.astype(np.int32),
        }


def random_segments(bits: np.ndarray, *, window: int, short_fraction: float, may_swap: bool) -> Segments:
    """Segments of random lengths, one sequence for each row of `bits`.

    Most texts fill a whole window. With probability `short_fraction` a text is shorter, of 2 .. `window` tokens, each
    length equally likely, and begins at a random position of its window. Every cut between A and B that leaves
    each a token is equally likely.

    Args:
        bits: "sequence NUM_RANDOM", from `random_bits`.
        window: tokens of a window, at least 2.
        short_fraction: probability of a short text.
        may_swap: whether half of the pairs are swapped.

    Source: Devlin et al. 2019 (arXiv 1810.04805), appendix A.2, and create_pretraining_data.py of google-research/bert
    for short texts; Lan et al. 2020, ALBERT (arXiv 1909.11942), section 3.1 for the order of the segments, as in
    Megatron-LM's BertDataset. These cut between sentences; here the text has no sentences, so the cut is anywhere.
    """
    short, num_short, begin, cut, swap = bits.T
    num_tokens = np.where(uniform(short) < short_fraction, integers(num_short, MIN_TOKENS, window), window)
    return Segments(
        window,
        num_tokens,
        num_first=integers(cut, 1, num_tokens - 1),
        is_swapped=(uniform(swap) < 0.5) & may_swap,
        begin=integers(begin, 0, window - num_tokens),
    )
