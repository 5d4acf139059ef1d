"""Vocabularies of byte pairs, trained on the text that is to be prepared."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxpipe.errors import ConfigError

BPE = "bpe:"
CAUSAL_TOKENS = ("<|endoftext|>",)
MASKED_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def vocab_size_of(tokenizer: str, *, is_masked: bool) -> int | None:
    """The words to train where `tokenizer` is bpe:VOCAB, None where it names a tokenizer.

    Raises:
        ConfigError: VOCAB is no number, or too small for the bytes and the special tokens.
    """
    if not tokenizer.startswith(BPE):
        return None
    fewest = len(pre_tokenizers.ByteLevel.alphabet()) + len(_special(is_masked))
    number = tokenizer.removeprefix(BPE)
    if not (number.isascii() and number.isdigit() and int(number) > fewest):
        raise ConfigError(
            f"--tokenizer={tokenizer} is no size of a vocabulary\n"
            f"  rule vocabulary-size: {BPE}VOCAB with more words than the 256 bytes and the special tokens\n"
            f"      special tokens: {', '.join(_special(is_masked))}\n"
            f"  repair: set --tokenizer={BPE}32000, or a size from {fewest + 1} on"
        )
    return int(number)


def train_vocabulary(texts: Iterable[str], *, vocab_size: int, is_masked: bool) -> tokenizers.Tokenizer:
    """A byte-level BPE as GPT-2 has it: every text is pairs of its bytes, and decodes to the same text.

    Args:
        texts: what is counted.
        vocab_size: words, bytes and special tokens among them; fewer where the texts have no more pairs.
        is_masked: whether it has BERT's special tokens, or GPT-2's one.

    Source: Sennrich et al. 2016 (arXiv 1508.07909); over bytes: Radford et al. 2019, section 2.2.

    Example:
        >>> library = train_vocabulary(["to be or not to be"] * 9, vocab_size=260, is_masked=False)
        >>> library.encode("to be").tokens
        ['to', 'Ġbe']
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_special(is_masked)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(texts, trainer)
    return library


def _special(is_masked: bool) -> tuple[str, ...]:
    return MASKED_TOKENS if is_masked else CAUSAL_TOKENS
