"""The tokenizer that a config asks for."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxpipe.config.model import family_of
from jaxpipe.data import Tokenizer, load_tokenizer


def tokenizer_of(config: ConfigDict) -> Tokenizer:
    """The tokenizer that `data` names, with the special tokens that the model's family needs.

    Raises:
        ConfigError: it is not there, or lacks them.
    """
    return load_tokenizer(config.data.tokenizer, is_masked=family_of(config).masked)
