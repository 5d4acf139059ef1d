"""Sequences of two segments, some words of which are masked and to be predicted, as BERT learns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.data.blocks import Tokens
from jaxpipe.data.draws import raw_draws
from jaxpipe.data.masked_vocabulary import MaskedVocabulary
from jaxpipe.data.masking import choose_words, num_predicted, replace_words
from jaxpipe.data.segments import FEWEST_TOKENS, NUM_DRAWS, NUM_SPECIAL, draw_segments
from jaxpipe.data.sequences import Batch

SHORTEST_SEQ_LEN = FEWEST_TOKENS + NUM_SPECIAL


@dataclass(frozen=True)
class MaskedSequences:
    """The text cut into windows that do not overlap; every epoch cuts, orders and masks each anew.

    A window of six words, cut behind the third and swapped, with one word to predict:

        window       the quick brown fox jumps over
        tokens       [CLS]  fox [MASK] over [SEP]  the quick brown [SEP]
        token_types    0     0     0     0     0     1    1     1     1
        predicted 2, targets jumps, sentence_order 1

    Attributes:
        tokens: at least `seq_len - 3`, ids of `vocabulary`; read where a sequence is taken.
        seq_len: tokens of one sequence with its special ones and padding; at least 5.
        vocabulary: the special tokens, and which ids are words.
        mask_fraction: of the words of a text, those to predict, in (0, 1].
        short_fraction: about this part of the texts is shorter than a window, in [0, 1].
        seed: decides, with epoch and sequence, all that is random.
        sentence_order: whether half of the pairs are swapped, and which they are is to be predicted.

    Example:
        >>> from jaxpipe.data import load_tokenizer
        >>> vocabulary = load_tokenizer("byte", is_masked=True).masked
        >>> text = np.frombuffer(b"to be, or not to be, that is the question", np.uint8)
        >>> sequences = MaskedSequences(text, 23, vocabulary, 0.15, short_fraction=0.1, seed=0, sentence_order=True)
        >>> sequences.take(np.array([1, 0]), epoch=0)["predicted"].shape
        (2, 3)
    """

    tokens: Tokens
    seq_len: int
    vocabulary: MaskedVocabulary
    mask_fraction: float
    short_fraction: float
    seed: int
    sentence_order: bool

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        return len(self.tokens) // self._longest

    @property
    def num_predicted(self) -> int:
        """Words that a sequence predicts, the most there are."""
        return num_predicted(self._longest, self.mask_fraction)

    def take(self, indices: np.ndarray, *, epoch: int) -> Batch:
        """The sequences `indices` as `epoch` sees them, a pure function of (seed, epoch, index); int32.

        Returns:
            "tokens", "token_types" (0 for [CLS] A [SEP] and padding, 1 for B [SEP]) and "padding_mask" (1 for a token,
            0 for padding), each "sequence seq"; "predicted" (places in the sequence, ascending) and "targets" (the
            words there), each "sequence predicted", places 0 and targets -1 where there are fewer; if
            `sentence_order`, "sentence_order" "sequence": 1 where the segments are swapped, else 0.
        """
        num_choices = self.num_predicted
        raw = raw_draws(self.seed, epoch, indices, num_draws=NUM_DRAWS + 2 * num_choices + self._longest)
        raw_segments, raw_words, raw_order = np.split(raw, [NUM_DRAWS, NUM_DRAWS + 2 * num_choices], axis=1)
        segments = draw_segments(
            raw_segments, longest=self._longest, short_fraction=self.short_fraction, may_swap=self.sentence_order
        )
        text = self.tokens[indices[:, None] * self._longest + segments.sources()].astype(np.int32)
        is_word = self.vocabulary.is_word[text] & segments.is_text()
        chosen = choose_words(raw_order, is_word, self.mask_fraction)
        is_chosen = chosen < self._longest

        # A last column, which has no place in the sequence, takes what is chosen where there are fewer.
        text = np.pad(text, ((0, 0), (0, 1)))
        targets = np.take_along_axis(text, chosen, axis=1)
        np.put_along_axis(text, chosen, replace_words(raw_words, targets, self.vocabulary), axis=1)
        places = np.pad(segments.places(), ((0, 0), (0, 1)))
        predicted = np.take_along_axis(places, chosen, axis=1)
        return {
            **segments.laid_out(text[:, :-1], self.vocabulary),
            "predicted": predicted.astype(np.int32),
            "targets": np.where(is_chosen, targets, -1),
            **self._order(segments.is_swapped.astype(np.int32)),
        }

    def fill(self, num_sequences: int) -> Batch:
        """Rows without a word to predict and without an order: a [CLS] and padding.

        The [CLS] counts as a token, since attention to none has no softmax.
        """
        shape, shape_predicted = (num_sequences, self.seq_len), (num_sequences, self.num_predicted)
        is_first = np.broadcast_to(np.arange(self.seq_len) == 0, shape)
        return {
            "tokens": np.where(is_first, self.vocabulary.classification, self.vocabulary.padding).astype(np.int32),
            "token_types": np.zeros(shape, np.int32),
            "padding_mask": is_first.astype(np.int32),
            "predicted": np.zeros(shape_predicted, np.int32),
            "targets": np.full(shape_predicted, -1, np.int32),
            **self._order(np.full(num_sequences, -1, np.int32)),
        }

    @property
    def _longest(self) -> int:
        return self.seq_len - NUM_SPECIAL

    def _order(self, order: np.ndarray) -> Batch:
        return {"sentence_order": order} if self.sentence_order else {}
