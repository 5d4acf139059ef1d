"""A text of words that are all different, so that each says where it comes from, and sequences read one by one."""

from dataclasses import dataclass, replace

import numpy as np

from jaxpipe.data import MaskedSequences, MaskedVocabulary

PADDING, CLASSIFICATION, SEPARATOR, MASK = 0, 1, 2, 3
NUM_SPECIAL = 4
SEQ_LEN = 40
WINDOW = SEQ_LEN - 3
NUM_SEQUENCES = 2000
NUM_WORDS = NUM_SEQUENCES * WINDOW

VOCABULARY = MaskedVocabulary(
    PADDING, CLASSIFICATION, SEPARATOR, MASK, is_maskable=np.arange(NUM_SPECIAL + NUM_WORDS) >= NUM_SPECIAL
)
SEQUENCES = MaskedSequences(
    np.arange(NUM_SPECIAL, NUM_SPECIAL + NUM_WORDS),
    SEQ_LEN,
    VOCABULARY,
    mask_fraction=0.15,
    short_fraction=0.1,
    seed=0,
    sentence_order=True,
)
WHOLE = replace(SEQUENCES, short_fraction=0.0)
ALL = np.arange(NUM_SEQUENCES)


@dataclass(frozen=True)
class Example:
    """A sequence as it was before anything was masked.

    Attributes:
        first: words before the first [SEP].
        second: words between the two [SEP].
        tokens: the whole sequence.
    """

    first: list[int]
    second: list[int]
    tokens: list[int]


def read(batch: dict[str, np.ndarray], row: int) -> Example:
    """Row `row` with its targets put back, token by token."""
    tokens = batch["tokens"][row].tolist()
    for place, word in zip(batch["predicted"][row].tolist(), batch["targets"][row].tolist(), strict=True):
        if word >= 0:
            tokens[place] = word
    cut = tokens.index(SEPARATOR)
    end = tokens.index(SEPARATOR, cut + 1)
    return Example(tokens[1:cut], tokens[cut + 1 : end], tokens)
