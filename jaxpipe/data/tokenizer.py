"""The tokenizer that `data.tokenizer` names: one of bytes, which needs no vocabulary, or that of a tokenizer.json.

Goes in: "byte", or the path of a tokenizer.json, the file format of Hugging Face's tokenizers library. Comes out: a
`Tokenizer`. Left to others: which text is tokenized (`corpus`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import tokenizers

from jaxpipe.data.protocols import MaskedVocabulary, Tokenizer
from jaxpipe.errors import ConfigError, explain
from jaxpipe.files import local_path, read_whole

FILE = "tokenizer.json"

# Names that common vocabularies give their special tokens; the first one found is used.
ENDS_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MASKED_NAMES = {
    "padding": ("[PAD]", "<pad>"),
    "classification": ("[CLS]", "<s>", "<cls>"),
    "separator": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}

GROUP_BYTES = 2**24  # encoded at a time: enough for all cores, and the library's results fit into memory
PLACES_BYTES = 2**20  # with the places of tokens: some hundred bytes for each


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library; see `Tokenizer`.

    Attributes:
        library: the library's tokenizer, which neither truncates nor pads, and reads names of special tokens as text.
        vocab_size: the largest token plus one; some tokens below may be unused.
        separator: the token that ends a document.
        masked: the special tokens of a masked model, None for others.
    """

    library: tokenizers.Tokenizer
    vocab_size: int
    separator: int
    masked: MaskedVocabulary | None

    @property
    def beginning(self) -> tuple[int, ...]:
        """The tokens that the file puts before a text: LLaMA's <s>; none for GPT-2."""
        with self._telling():
            encoding = self.library.encode("a")
        mask = encoding.special_tokens_mask
        return tuple(encoding.ids[: mask.index(0)]) if 0 in mask else ()

    @property
    def identity(self) -> str:
        """The SHA-256 of the vocabulary and of which tokens are special; saving the file again does not change it."""
        return _identity(self.library)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the tokens of `text`; invalid UTF-8 decodes to U+FFFD."""
        with self._telling():
            return self._ids(self.library.encode(_text(text), add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the tokens of each of `texts`, encoded by the threads of the library, one text in each."""
        with self._telling():
            encodings = self.library.encode_batch_fast([_text(text) for text in texts], add_special_tokens=False)
        return [self._ids(encoding) for encoding in encodings]

    @property
    def special_names(self) -> tuple[str, ...]:
        """The names of the tokens that the file itself marks as special."""
        return tuple(_marked_special(self.library).values())

    def encode_places(
        self, texts: Sequence[str], reads_special: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns the tokens of each of `texts`, the first character of each token and the one after its last.

        Names of special tokens in a text are these tokens, unless they are not read.
        """
        library, made = self._reading_special if reads_special else self.library, []
        for group in _groups(texts, PLACES_BYTES):
            with self._telling():
                encodings = library.encode_batch(group, add_special_tokens=False)
            places = [np.array(one.offsets, np.int64).reshape(-1, 2) for one in encodings]
            made += [(self._ids(one), place[:, 0], place[:, 1]) for one, place in zip(encodings, places, strict=True)]
        return made

    @cached_property
    def _reading_special(self) -> tokenizers.Tokenizer:
        library = tokenizers.Tokenizer.from_str(self.library.to_str())
        library.encode_special_tokens = False
        return library

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the tokens of each of `documents`, with the separator after them."""
        for group in _groups(documents):
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
        except Exception as error:
            raise ConfigError(
                explain(
                    "data.tokenizer names a vocabulary that cannot encode a text",
                    rule="tokenizer-words: there are tokens for all words, or one for those that are unknown",
                    picture=f"{error}; its special tokens are {', '.join(self.special_names) or 'none'}",
                    repair="name another file, or add the unknown token that its model asks for",
                )
            ) from error

    def _ids(self, encoding: tokenizers.Encoding) -> np.ndarray:
        return self._array(encoding.ids)

    def _array(self, ids: list[int]) -> np.ndarray:
        smallest = np.min_scalar_type(self.vocab_size - 1)
        return np.array(ids, smallest if smallest.itemsize < 4 else np.int32)


def identity_of(path: Path) -> str:
    """Returns the `identity` of the tokenizer in a tokenizer.json; it may lack special tokens.

    Raises:
        ConfigError: the file cannot be read.
    """
    return _identity(_library(path))


def file_of(name: str) -> Path:
    """Returns the path of the tokenizer.json that `name` is, or that is in the folder `name`; it may not be there."""
    path = local_path(name)
    return path / FILE if path.is_dir() else path


def read_tokenizer(name: str, *, is_masked: bool) -> HuggingFaceTokenizer:
    """Returns the tokenizer of a file.

    Args:
        name: the path of a tokenizer.json, or of a folder that contains one.
        is_masked: whether a masked model uses it, which needs special tokens.

    Raises:
        ConfigError: the file does not exist, cannot be read, or lacks the special tokens.
    """
    path = file_of(name)
    if not path.is_file():
        raise ConfigError(
            explain(
                f"data.tokenizer={name!r} is not a file",
                rule=f"tokenizer-file: data.tokenizer is 'byte', or the path of a {FILE}, or of a folder with one",
                picture=f"no {path}; current folder: {Path.cwd()}",
                repair="name a file that exists, or set data.tokenizer='byte'",
            )
        )
    return _read(path, path.stat().st_mtime_ns, is_masked)


@lru_cache(maxsize=4)
def _read(path: Path, changed_ns: int, is_masked: bool) -> HuggingFaceTokenizer:
    """Reads a file once until it changes: a large vocabulary takes a second."""
    del changed_ns
    library = _library(path)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    ids = library.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values(), default=-1) + 1
    if not is_masked:
        return HuggingFaceTokenizer(library, vocab_size, _end_of_document(ids, library, path), masked=None)
    masked = _masked_vocabulary(ids, vocab_size, library, path)
    return HuggingFaceTokenizer(library, vocab_size, masked.separator, masked)


def _identity(library: tokenizers.Tokenizer) -> str:
    vocabulary = sorted(library.get_vocab(with_added_tokens=True).items())
    content = json.dumps([vocabulary, sorted(_marked_special(library))])
    return f"sha256 {hashlib.sha256(content.encode()).hexdigest()}"


def _library(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(read_whole(path))
    except Exception as error:  # the library has no exceptions of its own
        raise ConfigError(
            explain(
                "data.tokenizer names a file that cannot be read",
                rule=f"tokenizer-form: the file was written by Hugging Face's tokenizers library, as every {FILE} is",
                picture=f"{path}: {error}",
                repair="name another file, or save this one again with tokenizers.Tokenizer.save",
            )
        ) from error


def _end_of_document(ids: dict[str, int], library: tokenizers.Tokenizer, path: Path) -> int:
    found = [ids[name] for name in ENDS_DOCUMENT if name in ids]
    if not found:
        raise ConfigError(
            explain(
                "data.tokenizer names a vocabulary without a token that ends a document",
                rule=f"document-end: one of {', '.join(ENDS_DOCUMENT)} separates documents",
                picture=_picture(library, path),
                repair="add one of them with tokenizers.Tokenizer.add_special_tokens",
            )
        )
    return found[0]


def _masked_vocabulary(
    ids: dict[str, int], vocab_size: int, library: tokenizers.Tokenizer, path: Path
) -> MaskedVocabulary:
    found = {kind: [ids[name] for name in names if name in ids] for kind, names in MASKED_NAMES.items()}
    missing = [f"{kind} ({' or '.join(MASKED_NAMES[kind])})" for kind, of_kind in found.items() if not of_kind]
    if missing:
        raise ConfigError(
            explain(
                f"data.tokenizer names a vocabulary without {', '.join(missing)}",
                rule="masked-tokens: a masked model has special tokens for padding, classification, separator and mask",
                picture=_picture(library, path),
                repair="use the tokenizer of a masked model, BERT's for example, or add what is missing with"
                " tokenizers.Tokenizer.add_special_tokens",
            )
        )
    special = {kind: of_kind[0] for kind, of_kind in found.items()}
    is_maskable = np.zeros(vocab_size, bool)
    is_maskable[list(ids.values())] = True
    is_maskable[[*special.values(), *_marked_special(library)]] = False
    return MaskedVocabulary(**special, is_maskable=is_maskable)


def _marked_special(library: tokenizers.Tokenizer) -> dict[int, str]:
    """The names of the tokens that the file itself marks as special, by token."""
    return {token: added.content for token, added in library.get_added_tokens_decoder().items() if added.special}


def _picture(library: tokenizers.Tokenizer, path: Path) -> str:
    return f"{path}: its special tokens are {', '.join(_marked_special(library).values()) or 'none'}"


def _text(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


_SomeText = TypeVar("_SomeText", str, bytes)


def _groups(documents: Iterable[_SomeText], most: int = GROUP_BYTES) -> Iterator[list[_SomeText]]:
    """Yields `documents` in groups of about `most` bytes or characters."""
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= most:
            yield group
            group, size = [], 0
    if group:
        yield group


BYTE = "byte"

NUM_BYTES = 256
END = 0  # a NUL byte ends every document; text does not contain it
SPECIAL = (b"[PAD]", b"[CLS]", b"[SEP]", b"[MASK]")  # follow the bytes, for masked models
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def load_tokenizer(name: str, *, is_masked: bool) -> Tokenizer:
    """Returns the tokenizer of `name`.

    Args:
        name: "byte", or the path of a tokenizer.json, or of a folder that contains one.
        is_masked: whether a masked model uses it, which needs special tokens.

    Raises:
        ConfigError: the file does not exist, cannot be read, or lacks the special tokens.
    """
    return ByteTokenizer(is_masked) if name == BYTE else read_tokenizer(name, is_masked=is_masked)


@dataclass(frozen=True)
class ByteTokenizer:
    """A tokenizer whose tokens are bytes; for masked models it has four additional special tokens.

    Attributes:
        is_masked: whether a masked model uses it.

    Example:
        >>> tokenizer = ByteTokenizer(is_masked=False)
        >>> tokenizer.encode("é!")
        array([195, 169,  33], dtype=uint8)
        >>> tokenizer.decode([195, 169, 33])
        'é!'
    """

    is_masked: bool

    @property
    def vocab_size(self) -> int:
        """Number of tokens: 256, or 260 for masked models."""
        return NUM_BYTES + len(SPECIAL) * self.is_masked

    @property
    def separator(self) -> int:
        """The NUL byte, which ends a document."""
        return END

    @property
    def masked(self) -> MaskedVocabulary | None:
        """The special tokens of a masked model, which may mask all bytes; None for a causal one."""
        if not self.is_masked:
            return None
        special = range(NUM_BYTES, self.vocab_size)
        return MaskedVocabulary(*special, is_maskable=np.arange(self.vocab_size) < NUM_BYTES)

    @property
    def beginning(self) -> tuple[int, ...]:
        """The empty tuple: a prompt begins with its own first byte."""
        return ()

    @property
    def identity(self) -> str:
        """The name "byte"."""
        return BYTE

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the bytes of `text`; characters are encoded as UTF-8."""
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, np.uint8).astype(np.min_scalar_type(self.vocab_size - 1))

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the bytes of each of `texts`."""
        return [self.encode(text) for text in texts]

    @property
    def special_names(self) -> tuple[str, ...]:
        """The empty tuple: no text is written with special tokens."""
        return ()

    def encode_places(
        self, texts: Sequence[str], reads_special: bool = True
    ) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Returns the bytes of each of `texts`, the character that each belongs to, and the one after it."""
        made = []
        for text in texts:
            letters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            sizes = 1 + (letters[:, None] >= [0x80, 0x800, 0x10000]).sum(axis=1)  # in UTF-8
            place = np.repeat(np.arange(len(text)), sizes)
            made.append((self.encode(text), place, place + 1))
        return made

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        """Yields the bytes of each of `documents`, with a NUL byte after them."""
        for document in documents:
            yield self.encode(document + bytes([END]))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`: invalid UTF-8 and unknown tokens as U+FFFD, special tokens by their names."""
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < NUM_BYTES:
            return bytes([token])
        return SPECIAL[token - NUM_BYTES] if NUM_BYTES <= token < self.vocab_size else UNKNOWN
