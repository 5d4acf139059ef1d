"""The section `data` of a config: its tokenizer, and the checks of vocabulary, blend and masked sequences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxpipe.config.base import RunConfig
from jaxpipe.config.model import family_of
from jaxpipe.data import Tokenizer, load_tokenizer
from jaxpipe.data.files import INDEXED, parse_blend
from jaxpipe.data.indexed import tokenizer_path, tokens_path
from jaxpipe.data.masked import MIN_SEQ_LEN, NUM_SPECIAL, num_predicted
from jaxpipe.data.special_tokens import TOKENIZER_CONFIG, beside
from jaxpipe.data.tokenizer_file import identity_of
from jaxpipe.errors import ConfigError

MOST_SHOWN = 5


def tokenizer_of(config: RunConfig) -> Tokenizer:
    """The tokenizer that `data` names, with the special tokens that the model's family needs.

    Raises:
        ConfigError: the tokenizer is missing, or lacks special tokens.
    """
    return load_tokenizer(config.data.tokenizer, is_masked=family_of(config).masked)


def num_predicted_of(config: RunConfig) -> int | None:
    """Number of tokens of a sequence that a masked model predicts; None for a causal model."""
    if not family_of(config).masked:
        return None
    return num_predicted(config.data.seq_len - NUM_SPECIAL, config.data.mask_fraction)


def check_vocabulary(config: RunConfig) -> None:
    """Raises ConfigError if the tokenizer is missing or has more tokens than the model's vocabulary."""
    needed = tokenizer_of(config).vocab_size
    if config.model.vocab_size < needed:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the number of tokens",
            rule="vocabulary: the model has a row for every token",
            picture=f"data.tokenizer={config.data.tokenizer!r}, {config.model.family}: tokens 0 .. {needed - 1}",
            repair=grow_or("name another data.tokenizer", num_tokens=needed)
            # A run from given parameters has its tables already, whose number of rows cannot just be set.
            if config.checkpoint.init_from
            else f"set model.vocab_size={needed}",
        )


def grow_or(other: str, *, num_tokens: int) -> str:
    """A repair for a run that starts from parameters whose tables have fewer rows than `num_tokens`."""
    return (
        f"{other}, or let the tables grow: jaxpipe.convert --from=hf:DIR --to=WORKDIR --vocab_size={num_tokens} of the"
        " model, and start from that WORKDIR (a run of jaxpipe.train goes to hf:DIR first)"
    )


def check_blend(config: RunConfig) -> None:
    """Raises ConfigError for no files, and for prepared files that are not PREFIX or WEIGHT PREFIX pairs."""
    if not config.data.files:
        raise ConfigError(
            "data.files is not set",
            rule="data-files: a run names the text that it trains on",
            repair="set --config.data.files='texts/*.txt', or indexed:PREFIX for what jaxpipe.prepare wrote",
        )
    if config.data.files.startswith(INDEXED):
        parse_blend(config.data.files)


def check_prepared_tokenizer(config: RunConfig) -> None:
    """Raises ConfigError for prepared files of another tokenizer than `data.tokenizer`.

    Prefixes without PREFIX.tokenizer.json, as those of Megatron-LM, may be of any; beside others that have one they
    are refused.
    """
    if not config.data.files.startswith(INDEXED):
        return
    try:
        there = [prefix for prefix in parse_blend(config.data.files) if tokens_path(prefix).is_file()]
        paths = {prefix: tokenizer_path(prefix) for prefix in there}
        own = tokenizer_of(config).identity
    except ConfigError:
        return  # `check` reports it by itself
    used = {prefix: identity_of(path) for prefix, path in paths.items() if path.is_file()}
    identities = {prefix: f"{path}: {used.get(prefix, 'no such file')}" for prefix, path in paths.items()}
    # Files without a record, as Megatron-LM's, are taken at their word, unless others have one.
    other = [prefix for prefix in paths if used and used.get(prefix) != own]
    if other:
        raise ConfigError(
            f"data.files: {other[0]!r} was not prepared with data.tokenizer={config.data.tokenizer!r}",
            rule="prepared-tokenizer: a token means the same in all files; PREFIX.tokenizer.json says what",
            picture="\n".join([f"data.tokenizer: {own}", *(identities[prefix] for prefix in other[:MOST_SHOWN])]),
            repair="set data.tokenizer to the one of the files, and prepare all files of a blend with one",
        )
    _check_prepared_ends(config, paths)


def _check_prepared_ends(config: RunConfig, paths: Mapping[str, Path]) -> None:
    """Raises ConfigError for files whose documents end otherwise than `data.tokenizer` says: a text would not stop."""
    tokenizer = tokenizer_of(config)
    for prefix, path in paths.items():
        if tokenizer.masked is None and beside(path, TOKENIZER_CONFIG).is_file():
            there = load_tokenizer(str(path), is_masked=False)
            if there.separator != tokenizer.separator:
                ends = [loaded.decode([loaded.separator]) for loaded in (tokenizer, there)]
                raise ConfigError(
                    f"data.files: documents of {prefix!r} end with another token than data.tokenizer names",
                    rule="prepared-end: what ends a document in the data ends the text that the model generates",
                    picture=f"data.tokenizer={config.data.tokenizer!r}: {ends[0]}\n{path}: {ends[1]}",
                    repair=f"set data.tokenizer={str(path)!r}, or prepare the data with data.tokenizer",
                )


def check_masked_sequence(config: RunConfig) -> None:
    """Raises ConfigError for sequences too short for the two segments of a masked model."""
    if family_of(config).masked and config.data.seq_len < MIN_SEQ_LEN:
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is too short for model.family={config.model.family!r}",
            rule="masked-sequence: a sequence holds two segments of at least one token and three special tokens",
            picture="[CLS] A [SEP] B [SEP]",
            repair=f"set data.seq_len={MIN_SEQ_LEN} or more",
        )
