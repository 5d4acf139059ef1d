"""Makes batches on the devices from a config's `data`: tokens, sequences, batches, and the rows of each process."""

from __future__ import annotations

import jax
import numpy as np

from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.data import tokenizer_of
from jaxpipe.data import (
    Batch,
    Batches,
    Blend,
    CausalSequences,
    Corpus,
    Documents,
    MaskedSequences,
    PackedSequences,
    Sequences,
    load_corpus,
)
from jaxpipe.data.packing import NONE, WINDOWS
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.mesh import num_batch_parts
from jaxpipe.program import Pipeline

# Few rows at a time: the first ones nearly always have an answer, so that most files are hardly read.
_ROWS = 256  # looked at together


def read_corpus(config: RunConfig) -> Corpus:
    """The tokens of the config's files.

    Raises:
        ConfigError: files or the tokenizer are missing, or there is too little text.
        DataError: a prepared file is damaged.
    """
    config = RunConfig.of(config)
    data = config.data
    tokenizer = tokenizer_of(config)
    return load_corpus(
        data.files,
        tokenizer=tokenizer,
        # Masked tokens are looked up in the tokenizer's vocabulary; the model's may be larger.
        vocab_size=config.model.vocab_size if tokenizer.masked is None else tokenizer.vocab_size,
        heldout_fraction=data.heldout_fraction,
        batch_size=data.batch_size,
        seq_len=data.seq_len,
        by_documents=data.packing != WINDOWS,
    )


def batches_of(config: RunConfig, part: Blend) -> Batches:
    """The batches of one part of the text, with the weights of its sources."""
    return Batches(
        tuple(_sequences_of(config, documents, source) for source, documents in enumerate(part.sources)),
        batch_size=config.data.batch_size,
        num_microbatches=config.pipeline.num_microbatches,
        seed=config.data.seed,
        weights=part.weights,
    )


def check_learned(config: RunConfig, train: Batches, heldout: Batches) -> None:
    """Raises DataError where answers alone are learned, and no row for training, or no evaluation, has any of them.

    Rows are read up to the first that has a learned token.
    """
    sources = [source for source in train.sources if isinstance(source, CausalSequences | PackedSequences)]
    if not any(source.learned is not None for source in sources):
        return
    rows = (
        # A generator: rows are made only until one has something to learn.
        source.take(np.arange(first, min(first + _ROWS, source.num_sequences)), epoch=0)
        for source in train.sources
        for first in range(0, source.num_sequences, _ROWS)
    )
    num_eval = config.train.eval_batches
    for batches, where, repair in (
        (rows, "to train on", "prepare texts with answers; or set data.seq_len to --seq_len of jaxpipe.prepare"),
        (
            heldout.first(num_eval),
            f"in the held-out rows that train.eval_batches={num_eval} takes",
            "set a larger train.eval_batches or data.heldout_fraction, or data.seq_len to --seq_len of jaxpipe.prepare",
        ),
    ):
        # A target below 0 marks a token that the loss leaves out.
        if not any((batch["targets"] >= 0).any() for batch in batches):
            raise DataError(
                f"data.files={config.data.files!r}: nothing to learn {where}",
                rule="learned-tokens: answers alone are learned, and some row predicts a token of an answer",
                picture=f"data.seq_len={config.data.seq_len}, data.packing={config.data.packing!r}, data"
                f"{padding_of(train)}",
                repair=repair,
            )


def padding_of(batches: Batches) -> str:
    """Rows of documents in words: their number, how much of them is padding, how many are cut; "" of windows."""
    packed = [source for source in batches.sources if isinstance(source, PackedSequences)]
    if not packed:
        return ""
    num_rows = sum(source.num_sequences for source in packed)
    padding = sum(source.padding * source.num_sequences for source in packed) / num_rows
    kind = "one document each" if packed[0].one_each else "documents back to back"
    num_cut, num_documents = (sum(getattr(source, name) for source in packed) for name in ("num_cut", "num_documents"))
    cut = f"; longer than a row and so cut: {num_cut:,} of {num_documents:,} documents" if num_cut else ""
    return f"; {num_rows:,} rows of {kind}, {padding:.2%} padding{cut}"


def example_batch(config: RunConfig) -> Batch:
    """A batch of random tokens, shaped as in a run of `config`, for uses that do not depend on the values."""
    data = config.data
    tokenizer = tokenizer_of(config)
    # Special tokens would change what a masked model learns, so only tokens that may be masked are drawn.
    known = np.arange(tokenizer.vocab_size) if tokenizer.masked is None else tokenizer.masked.maskable
    # One token more than the inputs: the last one is only a target.
    tokens = np.random.default_rng(0).choice(known, data.batch_size * data.seq_len + 1)
    return batches_of(config, Blend((Documents.one(tokens),))).at(0)


def _sequences_of(config: RunConfig, documents: Documents, source: int) -> Sequences:
    data = config.data
    vocabulary = tokenizer_of(config).masked
    if vocabulary is None and data.packing == WINDOWS:
        return CausalSequences(documents, data.seq_len)
    if vocabulary is None:
        packed = PackedSequences(
            documents,
            data.seq_len,
            one_each=data.packing == NONE,
            # Only experts ask: padding must not count as their load, and attention needs no mark.
            tells_padding=model_config(config).anatomy.num_experts > 1,
        )
        if not packed.num_sequences:
            raise ConfigError(
                f"data.files={data.files!r}: no document of two tokens to train on, or none to hold out",
                rule="enough-documents: with data.packing other than 'windows' whole documents are held out",
                picture=f"data.heldout_fraction={data.heldout_fraction}, data.packing={data.packing!r}",
                repair="name more documents, set a larger data.heldout_fraction, or data.packing='windows'",
            )
        return packed
    if documents.learned is not None:
        raise ConfigError(
            f"data.files={data.files!r} says which tokens are learned, and a masked model asks for others",
            rule="learned-tokens: answers are learned by models that predict the next token",
            picture=f"prepared with --format=chat, model.family={config.model.family!r}",
            repair="prepare the texts with another --format, or train a causal model",
        )
    return MaskedSequences(
        documents,
        data.seq_len,
        vocabulary=vocabulary,
        mask_fraction=data.mask_fraction,
        short_fraction=data.short_fraction,
        # A seed has 64 bits and data.seed has 32, so that each source gets its own masks.
        seed=data.seed + (source << 32),
        sentence_order=model_config(config).anatomy.sentence_order,
    )


def local_rows(pipeline: Pipeline, microbatch_size: int) -> np.ndarray:
    """The rows of every microbatch that the devices of this process hold, ascending: "row".

    All rows if this process has devices of every index along `BATCH_AXES`, as when the pipe axis spans the processes.
    """
    indices = pipeline.batch_sharding.addressable_devices_indices_map((1, microbatch_size)).values()
    # Devices along other axes hold the same rows, so each row comes several times.
    return np.unique([np.arange(microbatch_size)[index[1]] for index in indices if index is not None])


def put_batch(pipeline: Pipeline, batch: Batch, rows: np.ndarray | None = None) -> dict[str, jax.Array]:
    """Puts `batch` on the devices of all processes, sharded as the pipeline expects.

    Args:
        pipeline: the pipeline that reads the batch.
        batch: leaves "num_microbatches row ...", with equal numbers in all processes that hold a row.
        rows: the result of `local_rows` if `batch` has these rows only; None if it has all.
    """
    num_parts = num_batch_parts(pipeline.mesh)

    def put(leaf: np.ndarray) -> jax.Array:
        num_microbatches, num_rows, *rest = leaf.shape
        if rows is not None:
            # `leaf` has the rows of this process alone; JAX wants the global shape. Rows per part are equal everywhere.
            num_rows = num_rows * num_parts // len(local_rows(pipeline, num_parts))

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None  # JAX asks for the devices of this process only
            start, stop, _ = index[1].indices(num_rows)
            # JAX asks by global row; `leaf` has only the rows of this process, packed.
            begin = start if rows is None else int(np.searchsorted(rows, start))
            return leaf[:, begin : begin + stop - start]

        return jax.make_array_from_callback((num_microbatches, num_rows, *rest), pipeline.batch_sharding, shard)

    return {name: put(leaf) for name, leaf in batch.items()}
