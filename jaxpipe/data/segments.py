"""Two segments of text in one sequence: [CLS] A [SEP] B [SEP] and padding, in order or swapped.

Goes in: random numbers, one row a sequence. Comes out: which tokens of the sequence's window stand where. Left to
others: the tokens themselves, and which of them are masked (`masking`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.data.draws import integers, uniform
from jaxpipe.data.masked_vocabulary import MaskedVocabulary

NUM_SPECIAL = 3  # [CLS] and two [SEP]
FEWEST_TOKENS = 2  # one a segment
NUM_DRAWS = 5  # for a sequence: whether it is short, how short, from where, the place of the cut, whether swapped


@dataclass(frozen=True)
class Segments:
    """How the sequences of a batch are made up; the text of one are A's tokens, then B's.

    Attributes:
        longest: tokens of a window, the most that a text has.
        num_tokens: "sequence", tokens of the text, of A and B together.
        num_first: "sequence", tokens of A.
        is_swapped: "sequence", bool: A follows B in the window.
        begin: "sequence", where in its window the text begins.
    """

    longest: int
    num_tokens: np.ndarray
    num_first: np.ndarray
    is_swapped: np.ndarray
    begin: np.ndarray

    def is_text(self) -> np.ndarray:
        """Which places of a text have a token, "sequence longest", bool; the others are behind its last one."""
        return np.arange(self.longest) < self.num_tokens[:, None]

    def sources(self) -> np.ndarray:
        """Where in its window each token of a text stands, "sequence longest"; behind the last one anywhere in it."""
        shift = np.where(self.is_swapped, self.num_tokens - self.num_first, 0)
        return self.begin[:, None] + (np.arange(self.longest) + shift[:, None]) % self.num_tokens[:, None]

    def places(self) -> np.ndarray:
        """Where in its sequence each token of a text stands, "sequence longest"; behind the end where none is."""
        text = np.arange(self.longest)
        return np.where(self.is_text(), text + 1 + (text >= self.num_first[:, None]), self.longest + NUM_SPECIAL)

    def laid_out(self, text: np.ndarray, vocabulary: MaskedVocabulary) -> dict[str, np.ndarray]:
        """The arrays "tokens", "token_types" and "padding_mask", each "sequence seq", int32.

        Args:
            text: "sequence longest", the tokens; those behind a text's end are left out.
            vocabulary: of the special tokens.
        """
        rows, place = np.arange(len(text)), np.arange(self.longest + NUM_SPECIAL)
        # The last column takes what has no place.
        tokens = np.full((len(text), len(place) + 1), vocabulary.padding, np.int32)
        np.put_along_axis(tokens, self.places(), text, axis=1)
        tokens[:, 0] = vocabulary.classification
        tokens[rows, self.num_first + 1] = vocabulary.separator
        tokens[rows, self.num_tokens + 2] = vocabulary.separator
        is_token = place < self.num_tokens[:, None] + NUM_SPECIAL
        is_second = place > self.num_first[:, None] + 1
        return {
            "tokens": tokens[:, :-1],
            "token_types": (is_token & is_second).astype(np.int32),
            "padding_mask": is_token.astype(np.int32),
        }


def draw_segments(raw: np.ndarray, *, longest: int, short_fraction: float, may_swap: bool) -> Segments:
    """Segments of random lengths, one row for each of `raw`.

    Most texts are a whole window. With probability `short_fraction` one is shorter, of 2 .. `longest` tokens, each
    number as probable, from a random place of its window. The cut between A and B is anywhere that leaves each a token.

    Args:
        raw: "sequence NUM_DRAWS", of `raw_draws`.
        longest: tokens of a window, at least 2.
        short_fraction: the probability of a short text.
        may_swap: whether half of the pairs are swapped.

    Source: Devlin et al. 2019 (arXiv 1810.04805), appendix A.2, and create_pretraining_data.py of google-research/bert
    for short texts; Lan et al. 2020, ALBERT (arXiv 1909.11942), section 3.1 for the order of the segments, as
    Megatron-LM's BertDataset has it. Theirs cut between sentences; here the text has none, so the cut is anywhere.
    """
    short, num_short, begin, cut, swap = raw.T
    num_tokens = np.where(uniform(short) < short_fraction, integers(num_short, FEWEST_TOKENS, longest), longest)
    return Segments(
        longest,
        num_tokens,
        num_first=integers(cut, 1, num_tokens - 1),
        is_swapped=(uniform(swap) < 0.5) & may_swap,
        begin=integers(begin, 0, longest - num_tokens),
    )
