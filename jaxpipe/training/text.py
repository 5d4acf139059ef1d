"""What a config's `data` asks for: the text as tokens, its sequences, and the batches of them."""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from jaxpipe.config import model_config
from jaxpipe.config.tokenizer import tokenizer_of
from jaxpipe.data import (
    Batch,
    Batches,
    Blend,
    CausalSequences,
    Corpus,
    MaskedSequences,
    Sequences,
    Tokens,
    load_corpus,
)


def read_corpus(config: ConfigDict) -> Corpus:
    """The tokens of the config's files.

    Raises:
        ConfigError: files or a tokenizer that are not there, or too little text.
        DataError: a prepared file is damaged.
    """
    data, tokenizer = config.data, tokenizer_of(config)
    return load_corpus(
        data.files,
        tokenizer=tokenizer,
        # What is masked is looked up among the tokenizer's words, of which the model may have more.
        vocab_size=config.model.vocab_size if tokenizer.masked is None else tokenizer.vocab_size,
        heldout_fraction=data.heldout_fraction,
        batch_size=data.batch_size,
        seq_len=data.seq_len,
    )


def batches_of(config: ConfigDict, part: Blend) -> Batches:
    """The batches of a part of the text, each source with its share."""
    return Batches(
        tuple(_sequences_of(config, tokens, source) for source, tokens in enumerate(part.sources)),
        batch_size=config.data.batch_size,
        num_microbatches=config.pipeline.num_microbatches,
        seed=config.data.seed,
        weights=part.weights,
    )


def example_batch(config: ConfigDict) -> Batch:
    """A batch as a run of `config` gets them, of random words: for what does not depend on their values."""
    data, tokenizer = config.data, tokenizer_of(config)
    known = np.arange(tokenizer.vocab_size) if tokenizer.masked is None else tokenizer.masked.maskable
    tokens = np.random.default_rng(0).choice(known, data.batch_size * data.seq_len + 1)
    return batches_of(config, Blend((tokens,))).at(0)


def _sequences_of(config: ConfigDict, tokens: Tokens, source: int) -> Sequences:
    data, vocabulary = config.data, tokenizer_of(config).masked
    if vocabulary is None:
        return CausalSequences(tokens, data.seq_len)
    return MaskedSequences(
        tokens,
        data.seq_len,
        vocabulary=vocabulary,
        mask_fraction=data.mask_fraction,
        short_fraction=data.short_fraction,
        # Of 64 bits, of which data.seed has 32: sources are masked each in its own way.
        seed=data.seed + (source << 32),
        sentence_order=model_config(config).anatomy.sentence_order,
    )
