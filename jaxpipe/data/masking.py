"""Which words of a text a masked language model has to predict, and what stands in their place."""

from __future__ import annotations

import numpy as np

from jaxpipe.data.draws import integers, uniform
from jaxpipe.data.masked_vocabulary import MaskedVocabulary

MASKED, RANDOM = 0.8, 0.1  # of the predicted words: so many become [MASK], so many another word; the rest stay


def num_predicted(num_words: int, mask_fraction: float) -> int:
    """Words to predict of so many: about `mask_fraction` of them, at least one."""
    return max(1, round(mask_fraction * num_words))


def choose_words(raw: np.ndarray, is_word: np.ndarray, mask_fraction: float) -> np.ndarray:
    """The places of the words to predict in ascending order, then `longest` where there are fewer.

    Every set of `num_predicted` words of a text is as probable.

    Args:
        raw: "sequence longest", of `raw_draws`.
        is_word: "sequence longest", bool: what may be predicted.
        mask_fraction: of the words, those to predict, in (0, 1].

    Returns:
        "sequence predicted", int64; as many columns as a text of `longest` words has to predict.

    Source: Devlin et al. 2019 (arXiv 1810.04805), section 3.1; theirs rounds the fraction of all tokens of a sequence,
    with its special ones, ours of its words.
    """
    longest = is_word.shape[1]
    # A place in the lower bits makes keys different, so that every way to sort gives the same order.
    lower = np.uint64((1 << longest.bit_length()) - 1)
    keys = np.where(is_word, raw & ~lower, ~lower) | np.arange(longest, dtype=np.uint64)
    shuffled = (np.sort(keys, axis=1)[:, : num_predicted(longest, mask_fraction)] & lower).astype(np.int64)
    num_words = is_word.sum(axis=1)
    num_chosen = np.minimum(np.maximum(1, np.rint(mask_fraction * num_words)), num_words)
    return np.sort(np.where(np.arange(shuffled.shape[1]) < num_chosen[:, None], shuffled, longest), axis=1)


def replace_words(raw: np.ndarray, words: np.ndarray, vocabulary: MaskedVocabulary) -> np.ndarray:
    """What the model sees where `words` stood, "sequence predicted".

    [MASK] for 80 %, a random word for 10 %, the word itself for 10 %, each decided alone.

    Args:
        raw: "sequence 2 x predicted", of `raw_draws`.
        words: "sequence predicted", the words to predict.
        vocabulary: of the mask and of the words to draw from.

    Source: Devlin et al. 2019 (arXiv 1810.04805), section 3.1 and appendix A.1.
    """
    decision, word = np.split(raw, 2, axis=1)
    other = vocabulary.words[integers(word, 0, len(vocabulary.words) - 1)]
    part = uniform(decision)
    return np.where(part < MASKED, vocabulary.mask, np.where(part < MASKED + RANDOM, other, words))
