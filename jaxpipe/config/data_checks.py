"""Rules of `data`: a vocabulary for its tokens, a blend with weights, sequences that hold what a masked model needs."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxpipe.config.model import family_of
from jaxpipe.config.tokenizer import tokenizer_of
from jaxpipe.data.files import INDEXED, parse_blend
from jaxpipe.data.masked import MIN_SEQ_LEN
from jaxpipe.errors import ConfigError


def check_vocabulary(config: ConfigDict) -> None:
    """Raises ConfigError for a tokenizer that cannot be had, or a vocabulary that lacks tokens of it."""
    needed = tokenizer_of(config).vocab_size
    if config.model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokens there are\n"
            "  rule vocabulary: the model has a word for every token\n"
            f"      data.tokenizer={config.data.tokenizer!r} of a {config.model.family}: tokens 0 .. {needed - 1}\n"
            f"  repair: set model.vocab_size={needed}"
        )


def check_blend(config: ConfigDict) -> None:
    """Raises ConfigError for prepared files that are named neither alone nor with their weights."""
    if config.data.files.startswith(INDEXED):
        parse_blend(config.data.files)


def check_masked_sequence(config: ConfigDict) -> None:
    """Raises ConfigError for sequences too short for the two segments of a masked model."""
    if family_of(config).masked and config.data.seq_len < MIN_SEQ_LEN:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is too short for model.family={config.model.family!r}\n"
            "  rule masked-sequence: a sequence holds two segments of at least one token and three special tokens\n"
            "      [CLS] A [SEP] B [SEP]\n"
            f"  repair: set data.seq_len={MIN_SEQ_LEN} or more"
        )
