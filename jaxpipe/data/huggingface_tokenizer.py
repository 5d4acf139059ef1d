"""A tokenizer of Hugging Face's tokenizers library, as a `Tokenizer`: text to tokens and back.

Goes in: the library's object and what its files say. Left to others: reading these files (`tokenizer_file`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import tokenizers

from jaxpipe.data.protocols import MaskedVocabulary
from jaxpipe.data.special_tokens import END, SpecialTokens
from jaxpipe.errors import ConfigError, first_of

GROUP_BYTES = 2**24  # encoded at a time: enough for all cores, and the library's results fit into memory
PLACES_BYTES = 2**20  # with the places of tokens: some hundred bytes for each
Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library; see `Tokenizer`."""

    # The library's tokenizer, which neither truncates nor pads, and reads names of special tokens as text.
    library: tokenizers.Tokenizer
    vocab_size: int  # the largest token plus one; some tokens below may be unused
    special: SpecialTokens  # what the files beside it say
    separator: int  # the token that ends a document
    separator_from: str  # where its name or number comes from
    unknown: int | None  # the token of all that has no other; None if there is none
    masked: MaskedVocabulary | None  # the special tokens of a masked model, None for others
    drops: bool = False  # whether characters for which there is no token are left out; else they are an error

    @property
    def ends(self) -> tuple[int, ...]:
        """The separator, and the tokens at which generation_config.json ends a text, if they are special."""
        if self.masked is not None:
            return (self.separator,)
        # A token that is not special may stand inside a text, which must not end there.
        special = marked_special(self.library)
        return tuple(dict.fromkeys([self.separator, *(token for token in self.special.end_ids if token in special)]))

    @property
    def beginning(self) -> tuple[int, ...]:
        """The tokens that the file puts before a text: LLaMA's <s>; none for GPT-2."""
        with self._telling():
            for text in self._words():
                encoding = self.library.encode(text)
                mask = encoding.special_tokens_mask
                if 0 in mask:
                    return tuple(encoding.ids[: mask.index(0)])
        return ()

    def _words(self) -> Iterator[str]:
        """Texts of which one or more becomes a token: a vocabulary may lack any letter."""
        yield "a"
        # The first of a large vocabulary are enough, since one word in it becomes a token.
        yield from islice(self.library.get_vocab(with_added_tokens=False), 1000)

    def lacking(self, texts: Sequence[str | bytes], *, reads_special: bool = False) -> Counter[str]:
        """Returns the characters of `texts` that become no token at all, and how often each does.

        Characters that a normalizer or pre-tokenizer leaves out, as spaces, are not lacking.
        """
        library = self._reading_special if reads_special else self.library
        strings = [_text(text) for text in texts]
        counts: Counter[str] = Counter()
        with self._telling():
            # Each character is looked up once: a text has millions, and few different ones.
            new = set().union(*strings) - self._is_lacking.keys()
            self._is_lacking.update((letter, _becomes_nothing(self.library, letter)) for letter in new)
            some = {letter for letter, is_lacking in self._is_lacking.items() if is_lacking}
            for text in strings if some else ():
                lost = Counter(letter for letter in text if letter in some)
                if lost:
                    # A token of several letters may have it, though there is none of it alone.
                    tokens = library.encode(text, add_special_tokens=False).tokens
                    lost.subtract(letter for token in tokens for letter in token if letter in some)
                counts += lost
        return counts

    @cached_property
    def _is_lacking(self) -> dict[str, bool]:
        return {}

    @property
    def identity(self) -> str:
        """The SHA-256 of the vocabulary and of which tokens are special; saving the file again does not change it."""
        return identity(self.library)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the tokens of `text`; invalid UTF-8 decodes to U+FFFD."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the tokens of each of `texts`, encoded by the threads of the library, one text in each."""
        self._check_lacking(texts, reads_special=False)
        with self._telling():
            encodings = self.library.encode_batch_fast([_text(text) for text in texts], add_special_tokens=False)
        return [self._ids(encoding) for encoding in encodings]

    @property
    def special_tokens(self) -> dict[int, str]:
        """The names of the tokens that the files mark as special, by token."""
        return marked_special(self.library)

    @property
    def missing(self) -> tuple[str, ...]:
        """The special tokens that the files beside the tokenizer name and its vocabulary lacks."""
        return tuple(name for name in self.special.names if self.library.token_to_id(name) is None)

    @property
    def about(self) -> dict[str, Any]:
        """The files beside the tokenizer's own, as one tokenizer_config.json; empty if they say nothing."""
        said = self.special.to_json(frozenset(self.special.names) - {*self.missing})
        return said | {END: self.decode([self.separator])} if said or self.special.end_ids else {}

    def encode_places(
        self, texts: Sequence[str], reads_special: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns the tokens of each of `texts`, the first character of each token and the one after its last.

        Names of special tokens in a text are these tokens, unless they are not read.
        """
        self._check_lacking(texts, reads_special=reads_special)
        library = self._reading_special if reads_special else self.library
        results = []
        for group in groups(texts, PLACES_BYTES):
            with self._telling():
                encodings = library.encode_batch(group, add_special_tokens=False)
            # In two columns also where there is no token.
            places = [np.array(encoding.offsets, np.int64).reshape(-1, 2) for encoding in encodings]
            results += [
                (self._ids(encoding), place[:, 0], place[:, 1])
                for encoding, place in zip(encodings, places, strict=True)
            ]
        return results

    @cached_property
    def _reading_special(self) -> tokenizers.Tokenizer:
        # A copy: whether names of special tokens are read is a switch of the whole library object, and texts need
        # both.
        library = tokenizers.Tokenizer.from_str(self.library.to_str())
        library.encode_special_tokens = False
        return library

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the tokens of each of `documents`, with the separator after them."""
        for group in groups(documents, GROUP_BYTES):
            for tokens in self.encode_batch(group):
                yield np.append(tokens, self._array([self.separator]))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`, special ones by their names; unused ones are left out."""
        return self.library.decode([int(token) for token in tokens], skip_special_tokens=False)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Turns an error of the library, which has no exceptions of its own, into a ConfigError."""
        try:
            yield
        except BaseException as error:
            # A panic of the library is no Exception, and its class has no module to import it from.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(
                "data.tokenizer names a vocabulary that cannot encode a text",
                rule="tokenizer-words: there are tokens for all words, or one for those that are unknown",
                picture=f"{error}; its special tokens are {', '.join(self.special_tokens.values()) or 'none'}",
                repair="name another file, or add the unknown token that its model asks for",
            ) from error

    def _check_lacking(self, texts: Sequence[str | bytes], *, reads_special: bool) -> None:
        counts = Counter() if self.drops else self.lacking(texts, reads_special=reads_special)
        if counts:
            raise ConfigError(
                f"data.tokenizer names a vocabulary that lacks {len(counts)} characters of the text",
                rule="tokenizer-characters: there are tokens for all characters, or one for those that are unknown",
                picture=format_characters(counts),
                repair="name another tokenizer, or leave these characters out by jaxpipe.prepare --drop_characters",
            )

    def _ids(self, encoding: tokenizers.Encoding) -> np.ndarray:
        return self._array(encoding.ids)

    def _array(self, ids: list[int]) -> np.ndarray:
        smallest = np.min_scalar_type(self.vocab_size - 1)
        # Not uint32 for a large vocabulary: tokens are int32 in a batch.
        return np.array(ids, smallest if smallest.itemsize < 4 else np.int32)


def format_characters(counts: Counter[str]) -> str:
    """The most frequent characters, and how often each was there.

    Example:
        >>> format_characters(Counter("éé東"))
        "'é' U+00E9 2 times, '東' U+6771 1 times"
    """
    return first_of(
        [f"{letter!r} U+{ord(letter):04X} {num:,} times" for letter, num in counts.most_common()], joined_by=", "
    )


def identity(library: tokenizers.Tokenizer) -> str:
    """The SHA-256 of a vocabulary and of which tokens are special."""
    vocabulary = sorted(library.get_vocab(with_added_tokens=True).items())
    # Sorted, because saving a file again may change the order.
    content = json.dumps([vocabulary, sorted(marked_special(library))])
    return f"sha256 {hashlib.sha256(content.encode()).hexdigest()}"


def marked_special(library: tokenizers.Tokenizer) -> dict[int, str]:
    """The names of the tokens that are special, by token."""
    return {token: added.content for token, added in library.get_added_tokens_decoder().items() if added.special}


def _becomes_nothing(library: tokenizers.Tokenizer, letter: str) -> bool:
    """Whether a letter that is given to the model becomes no token, at least inside a word."""
    # Three, so that one stands inside a word: BERT has other tokens there than at a word's beginning.
    text = letter * 3
    encoding = library.encode(text, add_special_tokens=False)
    # Offsets of byte pairs leave out spaces, which are there all the same.
    covered = {place for first, stop in encoding.offsets for place in range(first, stop)}
    is_whole = bool(encoding.ids) if letter.isspace() else len(covered) == len(text)
    if is_whole:
        return False
    left = library.normalizer.normalize_str(text) if library.normalizer else text
    return bool(library.pre_tokenizer.pre_tokenize_str(left) if library.pre_tokenizer else left)


def _text(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def groups(items: Iterable[Item], most: int, *, size: Callable[[Item], int] = len) -> Iterator[list[Item]]:
    """Yields `items` in groups of about `most` bytes or characters, by the `size` of each."""
    group = []
    left = most
    for item in items:
        group.append(item)
        left -= size(item)
        if left <= 0:
            yield group
            group = []
            left = most
    if group:
        yield group
