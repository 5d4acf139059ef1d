"""The interfaces between the parts of this package: tokens, tokenizers, sequences of tokens, and batches of them.

`corpus` gives `Documents` of `Tokens`, a `Tokenizer` says what they mean, `packing` and `masked` cut them into
`Sequences`, and `batches` groups these into a `Batch`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

Batch = dict[str, np.ndarray]  # int32 arrays by name, as a model's loss takes them


class Tokens(Protocol):
    """A one-dimensional array of tokens that is read only where it is indexed; a NumPy array is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: np.ndarray, /) -> np.ndarray:
        """Returns the tokens at `positions`, of the same shape."""
        ...


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokens of which it is known where documents are, and which of them a model is to learn."""

    tokens: Tokens  # of all documents
    # Returns where each document begins and ends in `tokens`, "document" each, int64; called when `spans` is first
    # read.
    find_spans: Callable[[], tuple[np.ndarray, np.ndarray]]
    # For each token 1 if it is to be predicted, 0 if it is only read, as a prompt is; None: all are.
    learned: Tokens | None = None
    are_some: bool = False  # whether there are tokens that belong to no document

    @classmethod
    def one(cls, tokens: Tokens) -> Documents:
        """All `tokens` as one document."""
        return cls.ending_at(tokens, lambda: np.array([len(tokens)]))

    @classmethod
    def ending_at(cls, tokens: Tokens, find_ends: Callable[[], np.ndarray], learned: Tokens | None = None) -> Documents:
        """Documents that follow each other, by the end of each, "document", int64, ascending.

        Example:
            >>> Documents.ending_at(np.arange(7), lambda: np.array([3, 7])).spans
            (array([0, 3]), array([3, 7]))
        """

        def spans() -> tuple[np.ndarray, np.ndarray]:
            ends = find_ends()
            return np.concatenate([[0], ends[:-1]]).astype(np.int64), ends

        return cls(tokens, spans, learned)

    def __len__(self) -> int:
        """Tokens of all documents."""
        # Ends less starts: what lies between documents does not count.
        return int(np.subtract(*self.spans[::-1]).sum()) if self.are_some else len(self.tokens)

    def __getitem__(self, positions: np.ndarray, /) -> np.ndarray:
        """Returns the tokens at `positions`, of the same shape."""
        return self.tokens[positions]

    @cached_property
    def spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Where each document begins, and ends, "document" each, int64."""
        return self.find_spans()

    def targets(self, positions: np.ndarray) -> np.ndarray:
        """Returns the tokens at `positions` as targets, int32: -1, which the loss ignores, for those not learned."""
        tokens = self.tokens[positions].astype(np.int32)
        return tokens if self.learned is None else np.where(self.learned[positions] != 0, tokens, -1)


@dataclass(frozen=True, eq=False)
class MaskedVocabulary:
    """The special tokens of a masked language model, and which tokens may be masked."""

    padding: int  # fills a sequence up, [PAD]
    classification: int  # begins a sequence, [CLS]
    separator: int  # ends each of its two segments, [SEP]
    mask: int  # replaces a token that is to be predicted, [MASK]
    is_maskable: np.ndarray  # "vocab", bool: the ordinary tokens; only these are predicted or replace another

    @cached_property
    def maskable(self) -> np.ndarray:
        """The ordinary tokens, "maskable", in ascending order."""
        return np.flatnonzero(self.is_maskable)


class Tokenizer(Protocol):
    """Turns text into tokens and back. Tokens are of the smallest integer type that holds the vocabulary.

    What a class that inherits this does not say is so for bytes: each is a token, and none is special.
    """

    @property
    def vocab_size(self) -> int:
        """Upper bound of the tokens: each is less."""
        ...

    @property
    def separator(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens at which a generated text ends: the separator, and others that the tokenizer's files name."""
        return (self.separator,)

    @property
    def about(self) -> dict[str, Any]:
        """The contents of files beside the tokenizer's own, as one tokenizer_config.json; empty if they say nothing."""
        return {}

    @property
    def unknown(self) -> int | None:
        """The token of all that has no other; None if there is none."""
        return None

    @property
    def drops(self) -> bool:
        """Whether characters for which there is no token are left out; else they are an error."""
        return False

    def lacking(self, texts: Sequence[str | bytes], *, reads_special: bool = False) -> Counter[str]:
        """Returns the characters of `texts` that become no token at all, and how often each does.

        Args:
            reads_special: whether names of special tokens in them are these tokens.
        """
        return Counter()

    @property
    def masked(self) -> MaskedVocabulary | None:
        """The special tokens of a masked model; None if the tokenizer is not for one."""
        ...

    @property
    def beginning(self) -> tuple[int, ...]:
        """The tokens before a prompt: one if the model was trained with a token that begins a text, else none."""
        return ()

    @property
    def identity(self) -> str:
        """Text that is equal for two tokenizers if and only if their tokens mean the same, whatever their files."""
        ...

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the "tokens" of `text`, none of them special: the name of a special token is ordinary text."""
        ...

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the "tokens" of each of `texts`; uses all cores."""
        return [self.encode(text) for text in texts]

    @property
    def special_tokens(self) -> Mapping[int, str]:
        """The special tokens, as they are written in a text, by their numbers."""
        return {}

    def encode_places(
        self, texts: Sequence[str], reads_special: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns the "tokens" of each of `texts`, the first character of each, and the one after its last.

        Names of special tokens are these tokens if they are read, else ordinary text.
        """
        ...

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the "tokens" of each of `documents`, with the separator after them."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`, special ones by their names."""
        ...


class Sequences(Protocol):
    """The training examples that one epoch takes from a source of tokens."""

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        ...

    def take(self, indices: np.ndarray, *, epoch: int) -> Batch:
        """Returns the sequences `indices` as `epoch` sees them: int32 arrays "sequence ...", one row per index.

        A row depends on its own index and on `epoch`, not on the other rows.

        Args:
            indices: "sequence", each less than `num_sequences`.
        """
        ...
