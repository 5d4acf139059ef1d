"""Sequences of two segments in which some tokens are masked and predicted, as BERT is trained.

A sequence is [CLS] A [SEP] B [SEP] and padding, with segments A and B in order or swapped. Goes in: a source of tokens.
Comes out: rows for `Batches`. Left to others: which tokens may be masked (`MaskedVocabulary`).

Random numbers are addressed by (seed, epoch, sequence), so that no sequence depends on another. The numbers are the
same on every machine and with every version of NumPy, which guarantees the raw stream of a bit generator, but not what
its Generator makes of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.data.protocols import Batch, MaskedVocabulary, Tokens

NUM_SPECIAL = 3  # [CLS] and two [SEP]
MIN_TOKENS = 2  # one in each segment
NUM_RANDOM = 5  # per sequence: whether it is short, its length if so, its beginning, the cut, whether it is swapped


@dataclass(frozen=True)
class Segments:
    """The lengths and places of the segments of a batch; the text of a sequence is A's tokens, then B's."""

    window: int  # tokens of a window, the longest text
    num_tokens: np.ndarray  # "sequence", tokens of the text, A and B together
    num_first: np.ndarray  # "sequence", tokens of A
    is_swapped: np.ndarray  # "sequence", bool: A follows B in the window
    begin: np.ndarray  # "sequence", where in its window the text begins

    def is_text(self) -> np.ndarray:
        """Marks the columns of a text that hold a token, "sequence window", bool; the others follow its last token."""
        return np.arange(self.window) < self.num_tokens[:, None]

    def window_positions(self) -> np.ndarray:
        """Position in its window of each token of a text, "sequence window"; arbitrary after the last token."""
        # Swapped, A stands behind B: its first token is as far on as B is long.
        shift = np.where(self.is_swapped, self.num_tokens - self.num_first, 0)
        return self.begin[:, None] + (np.arange(self.window) + shift[:, None]) % self.num_tokens[:, None]

    def sequence_positions(self) -> np.ndarray:
        """Position in its sequence of each token of a text, "sequence window"; past the end after the last token."""
        text = np.arange(self.window)
        # + 1 for [CLS], and another from B on for the [SEP] between.
        return np.where(self.is_text(), text + 1 + (text >= self.num_first[:, None]), self.window + NUM_SPECIAL)

    def arrange(self, text: np.ndarray, vocabulary: MaskedVocabulary) -> dict[str, np.ndarray]:
        """Returns the arrays "tokens", "token_types" and "padding_mask", each "sequence seq", int32.

        Args:
            text: "sequence window", the tokens; those after the end of a text are ignored.
        """
        rows = np.arange(len(text))
        position = np.arange(self.window + NUM_SPECIAL)
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

    Source: Devlin et al. 2019 (arXiv 1810.04805), appendix A.2, and create_pretraining_data.py of google-research/bert
    for short texts; Lan et al. 2020, ALBERT (arXiv 1909.11942), section 3.1 for the order of the segments, as in
    Megatron-LM's BertDataset. The sources cut between sentences; text here has no sentences, so the cut is anywhere.
    """
    short, num_short, begin, cut, swap = bits.T
    # Every number is drawn, used or not, so that the others stay the same.
    num_tokens = np.where(uniform(short) < short_fraction, integers(num_short, MIN_TOKENS, window), window)
    return Segments(
        window,
        num_tokens,
        num_first=integers(cut, 1, num_tokens - 1),
        is_swapped=(uniform(swap) < 0.5) & may_swap,
        begin=integers(begin, 0, window - num_tokens),
    )


MIN_SEQ_LEN = MIN_TOKENS + NUM_SPECIAL
# Fractions of the predicted tokens that become [MASK] and a random token; the rest stay.
MASKED = 0.8
RANDOM = 0.1


@dataclass(frozen=True)
class MaskedSequences:
    """Consecutive windows of a source of tokens, without overlap; every epoch cuts, orders and masks each anew.

    A window of six words, cut after the third and swapped, with one word to predict:

        window       the quick brown fox jumps over
        tokens       [CLS]  fox [MASK] over [SEP]  the quick brown [SEP]
        token_types    0     0     0     0     0     1    1     1     1
        predicted 2, targets jumps, sentence_order 1

    Example:
        >>> from jaxpipe.data import load_tokenizer
        >>> vocabulary = load_tokenizer("byte", is_masked=True).masked
        >>> text = np.frombuffer(b"to be, or not to be, that is the question", np.uint8)
        >>> sequences = MaskedSequences(text, 23, vocabulary, 0.15, short_fraction=0.1, seed=0, sentence_order=True)
        >>> sequences.take(np.array([1, 0]), epoch=0)["predicted"].shape
        (2, 3)
    """

    tokens: Tokens  # the source, at least `seq_len - 3` tokens of `vocabulary`; read only where a sequence is taken
    seq_len: int  # tokens of one sequence with its special ones and padding; at least 5
    vocabulary: MaskedVocabulary  # the special tokens, and which tokens may be masked
    mask_fraction: float  # fraction of the maskable tokens of a text that is predicted, in (0, 1]
    short_fraction: float  # about this fraction of the texts is shorter than a window, in [0, 1]
    seed: int  # determines, with epoch and sequence, all that is random
    sentence_order: bool  # whether half of the pairs are swapped and the model predicts which

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        return len(self.tokens) // self._window

    @property
    def num_predicted(self) -> int:
        """Largest number of tokens that a sequence predicts."""
        return num_predicted(self._window, self.mask_fraction)

    def take(self, indices: np.ndarray, *, epoch: int) -> Batch:
        """Returns the sequences `indices` as `epoch` sees them, a pure function of (seed, epoch, index); int32.

        Returns:
            "tokens", "token_types" (0 for [CLS] A [SEP] and padding, 1 for B [SEP]) and "padding_mask" (1 for a token,
            0 for padding), each "sequence seq"; "predicted" (positions in the sequence, ascending) and "targets" (the
            tokens there), each "sequence predicted", positions 0 and targets -1 where there are fewer; if
            `sentence_order`, "sentence_order" "sequence": 1 where the segments are swapped, else 0.
        """
        most = self.num_predicted
        bits = random_bits(self.seed, epoch, indices, num_per_sequence=NUM_RANDOM + 2 * most + self._window)
        of_segments, of_replacements, of_choice = np.split(bits, [NUM_RANDOM, NUM_RANDOM + 2 * most], axis=1)
        segments = random_segments(
            of_segments, window=self._window, short_fraction=self.short_fraction, may_swap=self.sentence_order
        )
        text = self.tokens[indices[:, None] * self._window + segments.window_positions()].astype(np.int32)
        # A special token of the text is never predicted, nor is what follows the text's end.
        is_maskable = self.vocabulary.is_maskable[text] & segments.is_text()
        chosen = choose_predicted(of_choice, is_maskable, self.mask_fraction)
        is_chosen = chosen < self._window

        # An extra column, which has no position in the sequence, takes the choices that a row does not have.
        text = np.pad(text, ((0, 0), (0, 1)))
        targets = np.take_along_axis(text, chosen, axis=1)
        np.put_along_axis(text, chosen, replace_predicted(of_replacements, targets, self.vocabulary), axis=1)
        positions = np.pad(segments.sequence_positions(), ((0, 0), (0, 1)))
        predicted = np.take_along_axis(positions, chosen, axis=1)
        return {
            **segments.arrange(text[:, :-1], self.vocabulary),
            "predicted": predicted.astype(np.int32),
            # -1 is no target; such a choice stands in the extra column.
            "targets": np.where(is_chosen, targets, -1),
            **({"sentence_order": segments.is_swapped.astype(np.int32)} if self.sentence_order else {}),
        }

    @property
    def _window(self) -> int:
        """Tokens of a window: a sequence without its special tokens."""
        return self.seq_len - NUM_SPECIAL


def num_predicted(num_maskable: int, mask_fraction: float) -> int:
    """Number of tokens to predict: about `mask_fraction` of `num_maskable`, at least one."""
    return max(1, round(mask_fraction * num_maskable))


def choose_predicted(bits: np.ndarray, is_maskable: np.ndarray, mask_fraction: float) -> np.ndarray:
    """Returns the columns of the tokens to predict, ascending; a row with fewer of them ends with `window`.

    Every set of `num_predicted` maskable tokens of a text is equally likely: the maskable columns are sorted by their
    random bits, and the first ones are taken.

    Args:
        bits: "sequence window", from `random_bits`.
        is_maskable: "sequence window", bool.
        mask_fraction: fraction of the maskable tokens to predict, in (0, 1].

    Returns:
        "sequence predicted", int64; as many columns as a text of `window` maskable tokens has to predict.

    Example:
        >>> bits = np.array([[70, 10, 50, 30], [70, 10, 50, 30]], np.uint64) << np.uint64(32)
        >>> choose_predicted(bits, np.array([[True, True, True, True], [True, False, False, False]]), 0.5)
        array([[1, 3],
               [0, 4]])

    Source: Devlin et al. 2019 (arXiv 1810.04805), section 3.1, which takes the fraction of all tokens of a sequence,
    special ones included; here it is of the maskable ones.
    """
    window = is_maskable.shape[1]
    # The column in the lower bits makes all keys different, so that every sorting algorithm gives the same order.
    lower = np.uint64((1 << window.bit_length()) - 1)
    # Tokens that may not be masked have the largest keys, and come last.
    keys = np.where(is_maskable, bits & ~lower, ~lower) | np.arange(window, dtype=np.uint64)
    shuffled = (np.sort(keys, axis=1)[:, : num_predicted(window, mask_fraction)] & lower).astype(np.int64)
    num_maskable = is_maskable.sum(axis=1)
    # At least one, as far as a text has a token that may be masked.
    num_chosen = np.minimum(np.maximum(1, np.rint(mask_fraction * num_maskable)), num_maskable)
    return np.sort(np.where(np.arange(shuffled.shape[1]) < num_chosen[:, None], shuffled, window), axis=1)


def replace_predicted(bits: np.ndarray, targets: np.ndarray, vocabulary: MaskedVocabulary) -> np.ndarray:
    """Returns what the model sees in place of `targets`, "sequence predicted".

    Each target independently becomes [MASK] (80 %) or a random maskable token (10 %), or stays as it is (10 %).

    Args:
        bits: "sequence 2 x predicted", from `random_bits`.

    Source: Devlin et al. 2019 (arXiv 1810.04805), section 3.1 and appendix A.1.
    """
    decision, choice = np.split(bits, 2, axis=1)
    other = vocabulary.maskable[integers(choice, 0, len(vocabulary.maskable) - 1)]
    part = uniform(decision)
    return np.where(part < MASKED, vocabulary.mask, np.where(part < MASKED + RANDOM, other, targets))


def random_bits(seed: int, epoch: int, sequences: np.ndarray, *, num_per_sequence: int) -> np.ndarray:
    """Returns random numbers for each of `sequences`, uniform in 0 .. 2^64 - 1: "sequence number", uint64.

    Args:
        seed: first half of the generator's key, in 0 .. 2^64 - 1.
        epoch: second half of the generator's key, in 0 .. 2^64 - 1.
        sequences: "sequence"; each is the second word of the generator's counter, whose first word counts its numbers.

    Source: Philox4x64 of Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", as implemented by NumPy.
    """
    key = np.array([seed, epoch], np.uint64)
    # Raw bits of Philox: NumPy may change what `Generator` makes of them between versions.
    bits = np.empty((len(sequences), num_per_sequence), np.uint64)
    for row, sequence in zip(bits, sequences, strict=True):
        generator = np.random.Philox(key=key, counter=np.array([0, sequence, 0, 0], np.uint64))
        row[:] = generator.random_raw(num_per_sequence)
    return bits


def uniform(bits: np.ndarray) -> np.ndarray:
    """Random bits as float64 in [0, 1): their upper 53 bits, all that a float64 holds."""
    return (bits >> np.uint64(11)) * 2.0**-53


def integers(bits: np.ndarray, low: int | np.ndarray, high: int | np.ndarray) -> np.ndarray:
    """Random bits as int64 in low .. high, both included; `low` and `high` broadcast.

    Example:
        >>> integers(np.array([0, 2**63, 2**64 - 1], np.uint64), 1, 6)
        array([1, 4, 6])
    """
    return low + (uniform(bits) * (high - low + 1)).astype(np.int64)
