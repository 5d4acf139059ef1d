"""The tokenizer that `data.tokenizer` names: one of bytes, which needs no vocabulary, or that of a tokenizer.json.

Goes in: "byte", or the path of a tokenizer.json, the file format of Hugging Face's tokenizers library. Comes out: a
`Tokenizer`. Left to others: which text is tokenized (`corpus`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers

from jaxpipe.data.protocols import MaskedVocabulary, Tokenizer
from jaxpipe.data.special_tokens import (
    END,
    END_ID,
    FILE,
    TOKENIZER_CONFIG,
    SpecialTokens,
    files_beside,
    read_special_tokens,
)
from jaxpipe.errors import ConfigError, explain, first_of
from jaxpipe.files import local_path, read_whole

# Names that common vocabularies give their special tokens; the first special one is used where no file names one.
ENDS_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# Of each special token of a masked model, what the files beside the tokenizer call it, and its usual names.
MASKED_NAMES = {
    "padding": ("pad_token", ("[PAD]", "<pad>")),
    "classification": ("cls_token", ("[CLS]", "<s>", "<cls>")),
    "separator": ("sep_token", ("[SEP]", "</s>", "<sep>")),
    "mask": ("mask_token", ("[MASK]", "<mask>")),
}

MOST_TOKENS = 2**31  # they are int32 in a batch
GROUP_BYTES = 2**24  # encoded at a time: enough for all cores, and the library's results fit into memory
PLACES_BYTES = 2**20  # with the places of tokens: some hundred bytes for each


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library; see `Tokenizer`.

    Attributes:
        library: the library's tokenizer, which neither truncates nor pads, and reads names of special tokens as text.
        vocab_size: the largest token plus one; some tokens below may be unused.
        special: what the files beside it say.
        separator: the token that ends a document.
        separator_from: where its name or number comes from.
        unknown: the token of all that has no other; None if there is none.
        masked: the special tokens of a masked model, None for others.
        drops: whether characters for which there is no token are left out; else they are an error.
    """

    library: tokenizers.Tokenizer
    vocab_size: int
    special: SpecialTokens
    separator: int
    separator_from: str
    unknown: int | None
    masked: MaskedVocabulary | None
    drops: bool = False

    @property
    def ends(self) -> tuple[int, ...]:
        """The separator, and the tokens at which generation_config.json ends a text, if they are special."""
        if self.masked is not None:
            return (self.separator,)
        special = _marked_special(self.library)
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
        yield from islice(self.library.get_vocab(with_added_tokens=False), 1000)

    def lacking(self, texts: Sequence[str | bytes], *, reads_special: bool = False) -> Counter[str]:
        """Returns the characters of `texts` that become no token at all, and how often each does.

        What a normalizer or pre-tokenizer leaves out, as spaces, is not lacking.

        Args:
            texts: the texts.
            reads_special: whether names of special tokens in them are these tokens.
        """
        library = self._reading_special if reads_special else self.library
        strings = [_text(text) for text in texts]
        counts: Counter[str] = Counter()
        with self._telling():
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
        """The characters that were looked up."""
        return {}

    @property
    def identity(self) -> str:
        """The SHA-256 of the vocabulary and of which tokens are special; saving the file again does not change it."""
        return _identity(self.library)

    def encode(self, text: str | bytes) -> np.ndarray:
        """Returns the tokens of `text`; invalid UTF-8 decodes to U+FFFD."""
        self._check_lacking([text], reads_special=False)
        with self._telling():
            return self._ids(self.library.encode(_text(text), add_special_tokens=False))

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Returns the tokens of each of `texts`, encoded by the threads of the library, one text in each."""
        self._check_lacking(texts, reads_special=False)
        with self._telling():
            encodings = self.library.encode_batch_fast([_text(text) for text in texts], add_special_tokens=False)
        return [self._ids(encoding) for encoding in encodings]

    @property
    def special_names(self) -> tuple[str, ...]:
        """The names of the tokens that the files mark as special."""
        return tuple(_marked_special(self.library).values())

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """The tokens that the files mark as special."""
        return tuple(_marked_special(self.library))

    @property
    def missing(self) -> tuple[str, ...]:
        """The special tokens that the files beside the tokenizer name and its vocabulary lacks."""
        return tuple(name for name in self.special.names if self.library.token_to_id(name) is None)

    @property
    def about(self) -> dict[str, Any]:
        """What the files beside the tokenizer's own say, as one tokenizer_config.json; empty if they say nothing."""
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
        made = []
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
        except BaseException as error:
            # A panic of the library is no Exception, and its class has no module to import it from.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise ConfigError(
                explain(
                    "data.tokenizer names a vocabulary that cannot encode a text",
                    rule="tokenizer-words: there are tokens for all words, or one for those that are unknown",
                    picture=f"{error}; its special tokens are {', '.join(self.special_names) or 'none'}",
                    repair="name another file, or add the unknown token that its model asks for",
                )
            ) from error

    def _check_lacking(self, texts: Sequence[str | bytes], *, reads_special: bool) -> None:
        counts = Counter() if self.drops else self.lacking(texts, reads_special=reads_special)
        if counts:
            raise ConfigError(
                explain(
                    f"data.tokenizer names a vocabulary that lacks {len(counts)} characters of the text",
                    rule="tokenizer-characters: there are tokens for all characters, or one for those that are unknown",
                    picture=format_characters(counts),
                    repair="name another tokenizer, or leave these characters out by jaxpipe.prepare --drop_characters",
                )
            )

    def _ids(self, encoding: tokenizers.Encoding) -> np.ndarray:
        return self._array(encoding.ids)

    def _array(self, ids: list[int]) -> np.ndarray:
        smallest = np.min_scalar_type(self.vocab_size - 1)
        return np.array(ids, smallest if smallest.itemsize < 4 else np.int32)


def with_beginning(prompt: Sequence[int], tokenizer: Tokenizer, reads_special: bool = True) -> list[int]:
    """Returns the tokens of a prompt behind what the tokenizer puts before a text, unless the prompt writes it itself.

    Args:
        prompt: its tokens.
        tokenizer: that has made them.
        reads_special: whether names of special tokens in the prompt are these tokens.
    """
    beginning = [*tokenizer.beginning]
    return [*prompt] if reads_special and [*prompt[: len(beginning)]] == beginning else [*beginning, *prompt]


def format_characters(counts: Counter[str]) -> str:
    """The most frequent characters, and how often each was there.

    Example:
        >>> format_characters(Counter("éé東"))
        "'é' U+00E9 2 times, '東' U+6771 1 times"
    """
    return first_of(
        [f"{letter!r} U+{ord(letter):04X} {num:,} times" for letter, num in counts.most_common()], joined_by=", "
    )


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
    changed_ns = tuple(file.stat().st_mtime_ns for file in (path, *files_beside(path)) if file.is_file())
    return _read(path, changed_ns, is_masked)


@lru_cache(maxsize=4)
def _read(path: Path, changed_ns: tuple[int, ...], is_masked: bool) -> HuggingFaceTokenizer:
    """Reads a file once until it, or one beside it, changes: a large vocabulary takes a second."""
    del changed_ns
    library = _library(path)
    special = read_special_tokens(path)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    ids = library.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values(), default=-1) + 1
    if not 0 < vocab_size <= MOST_TOKENS:
        raise ConfigError(
            explain(
                f"data.tokenizer names a vocabulary whose largest token is {vocab_size - 1}",
                rule=f"tokenizer-size: there are tokens, and each is less than {MOST_TOKENS}, a row of a table",
                picture=f"{path}: {max(ids, key=ids.__getitem__, default='no token')!r}, {len(ids):,} tokens",
                repair="name another file, or number its tokens from 0 on",
            )
        )
    unknown = _unknown(library)
    if is_masked:
        masked = _masked_vocabulary(ids, vocab_size, library, special, path)
        return HuggingFaceTokenizer(library, vocab_size, special, masked.separator, "its usual name", unknown, masked)
    separator, separator_from = _end_of_document(ids, library, special, path)
    return HuggingFaceTokenizer(library, vocab_size, special, separator, separator_from, unknown, masked=None)


def _unknown(library: tokenizers.Tokenizer) -> int | None:
    model = library.model
    if isinstance(model, tokenizers.models.Unigram):
        return json.loads(model.__getstate__())["unk_id"]  # which has no attribute
    return None if model.unk_token is None else library.token_to_id(model.unk_token)


def _identity(library: tokenizers.Tokenizer) -> str:
    vocabulary = sorted(library.get_vocab(with_added_tokens=True).items())
    content = json.dumps([vocabulary, sorted(_marked_special(library))])
    return f"sha256 {hashlib.sha256(content.encode()).hexdigest()}"


def _library(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a file, in which what the files beside it name as special is special, as in transformers."""
    library = _from_file(path)
    added = library.get_added_tokens_decoder()
    new = []
    for name in read_special_tokens(path).names:
        token = library.token_to_id(name)
        if token is not None and not (token in added and added[token].special):
            new.append(added.get(token, tokenizers.AddedToken(name, normalized=False)))
    library.add_special_tokens(new)
    return library


def _from_file(path: Path) -> tokenizers.Tokenizer:
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


def _end_of_document(
    ids: dict[str, int], library: tokenizers.Tokenizer, special: SpecialTokens, path: Path
) -> tuple[int, str]:
    """The token that ends a document, and where it comes from."""
    name = special.named.get(END, "")
    marked = _marked_special(library)
    if name in ids:
        return ids[name], f"{END} of its files"
    unknown = f", since {END} {name!r} is not in the vocabulary" if name else ""
    by_id = [token for token in special.end_ids if token in marked]
    if by_id:
        return by_id[0], f"{END_ID} of {special.end_ids_from}{unknown}"
    usual = [ids[name] for name in ENDS_DOCUMENT if ids.get(name) in marked]
    if usual:
        return usual[0], f"its usual name{unknown}"
    raise ConfigError(
        explain(
            "data.tokenizer names a vocabulary without a token that ends a document",
            rule=f"document-end: one of {', '.join(ENDS_DOCUMENT)} that is special, or {END} of the {TOKENIZER_CONFIG}"
            " beside it, separates documents",
            picture=f"{_picture(library, path)}{unknown}",
            repair=f"name one in {TOKENIZER_CONFIG}, or add one with tokenizers.Tokenizer.add_special_tokens",
        )
    )


def _becomes_nothing(library: tokenizers.Tokenizer, letter: str) -> bool:
    """Whether a letter that is given to the model becomes no token, at least inside a word."""
    text = letter * 3
    encoding = library.encode(text, add_special_tokens=False)
    # Offsets of byte pairs leave out spaces, which are there all the same.
    covered = {place for first, stop in encoding.offsets for place in range(first, stop)}
    is_whole = bool(encoding.ids) if letter.isspace() else len(covered) == len(text)
    if is_whole:
        return False
    left = library.normalizer.normalize_str(text) if library.normalizer else text
    return bool(library.pre_tokenizer.pre_tokenize_str(left) if library.pre_tokenizer else left)


def _masked_vocabulary(
    ids: dict[str, int], vocab_size: int, library: tokenizers.Tokenizer, files: SpecialTokens, path: Path
) -> MaskedVocabulary:
    """What the files beside the tokenizer name, else the usual names that are special."""
    marked = _marked_special(library)
    found = {
        kind: [ids[name] for name in (files.named.get(in_files, ""), *usual) if ids.get(name) in marked]
        for kind, (in_files, usual) in MASKED_NAMES.items()
    }
    missing = [f"{kind} ({' or '.join(MASKED_NAMES[kind][1])})" for kind, of_kind in found.items() if not of_kind]
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
    is_maskable[[*special.values(), *marked]] = False
    return MaskedVocabulary(**special, is_maskable=is_maskable)


def _marked_special(library: tokenizers.Tokenizer) -> dict[int, str]:
    """The names of the tokens that are special, by token."""
    return {token: added.content for token, added in library.get_added_tokens_decoder().items() if added.special}


def _picture(library: tokenizers.Tokenizer, path: Path) -> str:
    return f"{path}: its special tokens are {', '.join(_marked_special(library).values()) or 'none'}"


def _text(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


_SomeText = TypeVar("_SomeText", str, bytes)


def _groups(documents: Iterable[_SomeText], most: int = GROUP_BYTES) -> Iterator[list[_SomeText]]:
    """Yields `documents` in groups of about `most` bytes or characters."""
    group = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document)
        if size >= most:
            yield group
            group = []
            size = 0
    if group:
        yield group


BYTE = "byte"

NUM_BYTES = 256
END_BYTE = 0  # a NUL byte ends every document; text does not contain it
SPECIAL = (b"[PAD]", b"[CLS]", b"[SEP]", b"[MASK]")  # follow the bytes, for masked models
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def load_tokenizer(name: str, *, is_masked: bool, drops: bool = False) -> ByteTokenizer | HuggingFaceTokenizer:
    """Returns the tokenizer of `name`.

    Args:
        name: "byte", or the path of a tokenizer.json, or of a folder that contains one.
        is_masked: whether a masked model uses it, which needs special tokens.
        drops: whether characters that the vocabulary lacks are left out; else they are an error.

    Raises:
        ConfigError: the file does not exist, cannot be read, or lacks the special tokens.
    """
    if name == BYTE:
        return ByteTokenizer(is_masked)
    tokenizer = read_tokenizer(name, is_masked=is_masked)
    return replace(tokenizer, drops=True) if drops else tokenizer


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
        return END_BYTE

    @property
    def ends(self) -> tuple[int, ...]:
        """The separator alone."""
        return (END_BYTE,)

    @property
    def missing(self) -> tuple[str, ...]:
        """The empty tuple."""
        return ()

    @property
    def about(self) -> dict[str, Any]:
        """Empty: there are no files."""
        return {}

    @property
    def drops(self) -> bool:
        """False: there is nothing to leave out."""
        return False

    @property
    def separator_from(self) -> str:
        """Text that says what bytes end a document."""
        return "a NUL byte"

    @property
    def unknown(self) -> int | None:
        """None: every text is bytes."""
        return None

    def lacking(self, texts: Sequence[str | bytes], *, reads_special: bool = False) -> Counter[str]:
        """Returns an empty counter: every text is bytes."""
        del texts, reads_special
        return Counter()

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

    @property
    def special_tokens(self) -> tuple[int, ...]:
        """The empty tuple."""
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
            yield self.encode(document + bytes([END_BYTE]))

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of `tokens`: invalid UTF-8 and unknown tokens as U+FFFD, special tokens by their names."""
        return b"".join(map(self._bytes_of, tokens)).decode(errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        if 0 <= token < NUM_BYTES:
            return bytes([token])
        return SPECIAL[token - NUM_BYTES] if NUM_BYTES <= token < self.vocab_size else UNKNOWN
