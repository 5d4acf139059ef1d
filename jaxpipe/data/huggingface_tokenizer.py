"""Tokens of a vocabulary in a tokenizer.json, the file in which Hugging Face keeps a trained tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers

from jaxpipe.data.masked_vocabulary import MaskedVocabulary
from jaxpipe.errors import ConfigError

FILE = "tokenizer.json"

# What vocabularies call a special token; the first one found counts.
ENDS_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
MASKED_NAMES = {
    "padding": ("[PAD]", "<pad>"),
    "classification": ("[CLS]", "<s>", "<cls>"),
    "separator": ("[SEP]", "</s>", "<sep>"),
    "mask": ("[MASK]", "<mask>"),
}

GROUP_BYTES = 2**24  # encoded at a time: enough for all cores, and what the library keeps of it fits


@dataclass(frozen=True, eq=False)
class HuggingFaceTokenizer:
    """A tokenizer of the `tokenizers` library; see `Tokenizer`.

    Attributes:
        library: cuts nothing off, fills nothing up and reads the names of special tokens as text.
        vocab_size: the largest id and one; ids between may be free.
        separator: the token that ends a document.
        masked: the special tokens of a masked model, None for others.
    """

    library: tokenizers.Tokenizer
    vocab_size: int
    separator: int
    masked: MaskedVocabulary | None

    @property
    def beginning(self) -> tuple[int, ...]:
        """What the file says to put before a text: LLaMA's <s>; of GPT-2 none."""
        encoding = self.library.encode("a")
        return tuple(encoding.ids[: encoding.special_tokens_mask.index(0)])

    @property
    def identity(self) -> str:
        """The SHA-256 of all words and their ids, and of which are special: the same of a file that is saved again."""
        words = sorted(self.library.get_vocab(with_added_tokens=True).items())
        content = json.dumps([words, sorted(_marked_special(self.library))])
        return f"sha256 {hashlib.sha256(content.encode()).hexdigest()}"

    def encode(self, text: str | bytes) -> np.ndarray:
        """The tokens of `text`; bytes that are no UTF-8 read as U+FFFD."""
        return self._ids(self.library.encode(_text(text), add_special_tokens=False))

    def encode_documents(self, documents: Iterable[bytes]) -> np.ndarray:
        """The tokens of all `documents`, on all cores, a separator behind each; a document is encoded whole."""
        separator = self._array([self.separator])
        parts = [self._array([])]
        for group in _groups(documents):
            for encoding in self.library.encode_batch_fast(group, add_special_tokens=False):
                parts += [self._ids(encoding), separator]
        return np.concatenate(parts)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, special ones by their names; free ids are left out."""
        return self.library.decode([int(token) for token in tokens], skip_special_tokens=False)

    def _ids(self, encoding: tokenizers.Encoding) -> np.ndarray:
        return self._array(encoding.ids)

    def _array(self, ids: list[int]) -> np.ndarray:
        smallest = np.min_scalar_type(self.vocab_size - 1)
        return np.array(ids, smallest if smallest.itemsize < 4 else np.int32)


def read_tokenizer(name: str, *, is_masked: bool) -> HuggingFaceTokenizer:
    """The tokenizer of a file.

    Args:
        name: the path of a tokenizer.json, or of a folder that has one.
        is_masked: whether a masked model uses it, which needs special tokens.

    Raises:
        ConfigError: no such file, or it cannot be read, or it lacks special tokens that are needed.
    """
    path = Path(name).expanduser()
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"data.tokenizer={name!r} is no file\n"
            f"  rule tokenizer-file: data.tokenizer is 'byte', or the path of a {FILE}, or of a folder that has one\n"
            f"      no {path}, looked from {Path.cwd()}\n"
            "  repair: name a file that exists, or set data.tokenizer='byte'"
        )
    return _read(path, path.stat().st_mtime_ns, is_masked)


@lru_cache(maxsize=4)
def _read(path: Path, changed_ns: int, is_masked: bool) -> HuggingFaceTokenizer:
    """Read once until the file changes: a large vocabulary takes a second."""
    del changed_ns
    library = _library(path)
    library.no_truncation()
    library.no_padding()
    library.encode_special_tokens = True
    ids = library.get_vocab(with_added_tokens=True)
    vocab_size = max(ids.values()) + 1
    if not is_masked:
        return HuggingFaceTokenizer(library, vocab_size, _end_of_document(ids, library, path), masked=None)
    masked = _masked_vocabulary(ids, vocab_size, library, path)
    return HuggingFaceTokenizer(library, vocab_size, masked.separator, masked)


def _library(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library has no exceptions of its own
        raise ConfigError(
            "data.tokenizer names a file that cannot be read\n"
            f"  rule tokenizer-form: the file is one that Hugging Face's tokenizers library wrote, as every {FILE} is\n"
            f"      {path}: {error}\n"
            "  repair: name another file, or save this one again with tokenizers.Tokenizer.save"
        ) from error


def _end_of_document(ids: dict[str, int], library: tokenizers.Tokenizer, path: Path) -> int:
    found = [ids[name] for name in ENDS_DOCUMENT if name in ids]
    if not found:
        raise ConfigError(
            "data.tokenizer names a vocabulary without a token that ends a document\n"
            f"  rule document-end: one of {', '.join(ENDS_DOCUMENT)} stands between documents\n"
            f"{_picture(library, path)}"
            "  repair: add one of them with tokenizers.Tokenizer.add_special_tokens"
        )
    return found[0]


def _masked_vocabulary(
    ids: dict[str, int], vocab_size: int, library: tokenizers.Tokenizer, path: Path
) -> MaskedVocabulary:
    found = {kind: [ids[name] for name in names if name in ids] for kind, names in MASKED_NAMES.items()}
    missing = [f"{kind} ({' or '.join(MASKED_NAMES[kind])})" for kind, of_kind in found.items() if not of_kind]
    if missing:
        raise ConfigError(
            f"data.tokenizer names a vocabulary without {', '.join(missing)}\n"
            "  rule masked-tokens: a masked model has special tokens for padding, classification, separator and mask\n"
            f"{_picture(library, path)}"
            "  repair: take the tokenizer of a masked model, BERT's for example, or add what is missing with"
            " tokenizers.Tokenizer.add_special_tokens"
        )
    special = {kind: of_kind[0] for kind, of_kind in found.items()}
    is_word = np.zeros(vocab_size, bool)
    is_word[list(ids.values())] = True
    is_word[[*special.values(), *_marked_special(library)]] = False
    return MaskedVocabulary(**special, is_word=is_word)


def _marked_special(library: tokenizers.Tokenizer) -> dict[int, str]:
    """The tokens that the file itself says are no words, by their ids."""
    return {token: added.content for token, added in library.get_added_tokens_decoder().items() if added.special}


def _picture(library: tokenizers.Tokenizer, path: Path) -> str:
    return f"      {path}: its special tokens are {', '.join(_marked_special(library).values()) or 'none'}\n"


def _text(text: str | bytes) -> str:
    return text.decode(errors="replace") if isinstance(text, bytes) else text


def _groups(documents: Iterable[bytes]) -> Iterator[list[str]]:
    """`documents` as text, so many at a time as make up about `GROUP_BYTES`."""
    group, num_bytes = [], 0
    for document in documents:
        group.append(_text(document))
        num_bytes += len(document)
        if num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group
