"""Reads a tokenizer.json and the files beside it: the library's tokenizer, and which of its tokens mean what.

Goes in: the path of the file or of its folder. Comes out: a `HuggingFaceTokenizer`, or an error that says which special
token is missing.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers

from jaxpipe.data.huggingface_tokenizer import HuggingFaceTokenizer, identity, marked_special
from jaxpipe.data.protocols import MaskedVocabulary
from jaxpipe.data.special_tokens import (
    END,
    END_ID,
    FILE,
    TOKENIZER_CONFIG,
    SpecialTokens,
    files_beside,
    read_special_tokens,
)
from jaxpipe.errors import ConfigError
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


def identity_of(path: Path) -> str:
    """The `identity` of a tokenizer.json, which may lack special tokens; ConfigError if it cannot be read."""
    return identity(_library(path))


def file_of(name: str) -> Path:
    """Returns the path of the tokenizer.json that `name` is, or that is in the folder `name`; it may not be there."""
    path = local_path(name)
    return path / FILE if path.is_dir() else path


def read_tokenizer(name: str, *, is_masked: bool) -> HuggingFaceTokenizer:
    """Returns the tokenizer of a file."""
    path = file_of(name)
    if not path.is_file():
        raise ConfigError(
            f"data.tokenizer={name!r} is not a file",
            rule=f"tokenizer-file: data.tokenizer is 'byte', or the path of a {FILE}, or of a folder with one",
            picture=f"no {path}; current folder: {Path.cwd()}",
            repair="name a file that exists, or set data.tokenizer='byte'",
        )
    # The times are a part of the cache's key, so that a changed file is read again.
    changed_ns = tuple(file.stat().st_mtime_ns for file in (path, *files_beside(path)) if file.is_file())
    return _read(path, changed_ns, is_masked)


@lru_cache(maxsize=4)
def _read(path: Path, changed_ns: tuple[int, ...], is_masked: bool) -> HuggingFaceTokenizer:
    """Reads a file once until it, or one beside it, changes: a large vocabulary takes a second."""
    del changed_ns
    library = _library(path)
    special = read_special_tokens(path)
    # Lengths in the file are for another use: nothing is cut or padded here.
    library.no_truncation()
    library.no_padding()
    # Names of special tokens in a text are text: only the program puts the tokens there.
    library.encode_special_tokens = True
    ids = library.get_vocab(with_added_tokens=True)
    # The largest token and not the number of tokens: numbers may have gaps, and each is a row of a table.
    vocab_size = max(ids.values(), default=-1) + 1
    if not 0 < vocab_size <= MOST_TOKENS:
        raise ConfigError(
            f"data.tokenizer names a vocabulary whose largest token is {vocab_size - 1}",
            rule=f"tokenizer-size: there are tokens, and each is less than {MOST_TOKENS}, a row of a table",
            picture=f"{path}: {max(ids, key=ids.__getitem__, default='no token')!r}, {len(ids):,} tokens",
            repair="name another file, or number its tokens from 0 on",
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


def _library(path: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a file, in which what the files beside it name as special is special, as in transformers."""
    try:
        library = tokenizers.Tokenizer.from_str(read_whole(path))
    except Exception as error:  # the library has no exceptions of its own
        raise ConfigError(
            "data.tokenizer names a file that cannot be read",
            rule=f"tokenizer-form: the file was written by Hugging Face's tokenizers library, as every {FILE} is",
            picture=f"{path}: {error}",
            repair="name another file, or save this one again with tokenizers.Tokenizer.save",
        ) from error
    added = library.get_added_tokens_decoder()
    new = []
    for name in read_special_tokens(path).names:
        token = library.token_to_id(name)
        if token is not None and not (token in added and added[token].special):
            # As transformers: the name is looked for in the text as it is, before the normalizer.
            new.append(added.get(token, tokenizers.AddedToken(name, normalized=False)))
    library.add_special_tokens(new)
    return library


def _end_of_document(
    ids: dict[str, int], library: tokenizers.Tokenizer, special: SpecialTokens, path: Path
) -> tuple[int, str]:
    """The token that ends a document, and where it comes from."""
    name = special.named.get(END, "")
    marked = marked_special(library)
    if name in ids:
        return ids[name], f"{END} of its files"
    unknown = f", since {END} {name!r} is not in the vocabulary" if name else ""
    by_id = [token for token in special.end_ids if token in marked]
    if by_id:
        return by_id[0], f"{END_ID} of {special.end_ids_from}{unknown}"
    # Special ones alone: a text vocabulary may have "</s>" as a word.
    usual = [ids[name] for name in ENDS_DOCUMENT if ids.get(name) in marked]
    if usual:
        return usual[0], f"its usual name{unknown}"
    raise ConfigError(
        "data.tokenizer names a vocabulary without a token that ends a document",
        rule=f"document-end: one of {', '.join(ENDS_DOCUMENT)} that is special, or {END} of the {TOKENIZER_CONFIG}"
        " beside it, separates documents",
        picture=f"{_picture(library, path)}{unknown}",
        repair=f"name one in {TOKENIZER_CONFIG}, or add one with tokenizers.Tokenizer.add_special_tokens",
    )


def _masked_vocabulary(
    ids: dict[str, int], vocab_size: int, library: tokenizers.Tokenizer, files: SpecialTokens, path: Path
) -> MaskedVocabulary:
    """The special tokens that the files beside the tokenizer name, else those with the usual names."""
    marked = marked_special(library)
    candidates = {
        kind: [ids[name] for name in (files.named.get(in_files, ""), *usual) if ids.get(name) in marked]
        for kind, (in_files, usual) in MASKED_NAMES.items()
    }
    missing = [f"{kind} ({' or '.join(MASKED_NAMES[kind][1])})" for kind, of_kind in candidates.items() if not of_kind]
    if missing:
        raise ConfigError(
            f"data.tokenizer names a vocabulary without {', '.join(missing)}",
            rule="masked-tokens: a masked model has special tokens for padding, classification, separator and mask",
            picture=_picture(library, path),
            repair="use the tokenizer of a masked model, BERT's for example, or add what is missing with"
            " tokenizers.Tokenizer.add_special_tokens",
        )
    special = {kind: of_kind[0] for kind, of_kind in candidates.items()}
    # Unused numbers are not maskable: a random token is one that a text can have.
    is_maskable = np.zeros(vocab_size, bool)
    is_maskable[list(ids.values())] = True
    is_maskable[[*special.values(), *marked]] = False
    return MaskedVocabulary(**special, is_maskable=is_maskable)


def _picture(library: tokenizers.Tokenizer, path: Path) -> str:
    return f"{path}: its special tokens are {', '.join(marked_special(library).values()) or 'none'}"
