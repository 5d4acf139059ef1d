"""The tokenizer that `data.tokenizer` names: one of bytes, or that of a tokenizer.json.

Goes in: "byte", or the path of a tokenizer.json, the file format of Hugging Face's tokenizers library. Comes out: a
`Tokenizer`. Left to others: which text is tokenized (`corpus`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxpipe.data.byte_tokenizer import BYTE, ByteTokenizer
from jaxpipe.data.huggingface_tokenizer import HuggingFaceTokenizer
from jaxpipe.data.protocols import Tokenizer
from jaxpipe.data.tokenizer_file import read_tokenizer


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


def with_beginning(prompt: Sequence[int], tokenizer: Tokenizer, reads_special: bool = True) -> list[int]:
    """Returns a prompt's tokens behind what the tokenizer puts before a text, unless the prompt writes it itself."""
    beginning = [*tokenizer.beginning]
    return [*prompt] if reads_special and [*prompt[: len(beginning)]] == beginning else [*beginning, *prompt]
