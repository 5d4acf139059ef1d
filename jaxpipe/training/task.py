"""The task of a run: a model and its batches, as a config describes them or as they are given in Python.

Goes in: a checked config. Comes out: a `Task`, before any device is asked for. Left to others: devices, pipeline and
optimizer (`setup`), and models and batches of one's own (`given`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.model import family_of, vocab_pipe
from jaxpipe.data import Batch, Corpus, Fingerprint
from jaxpipe.mesh import TensorAxis
from jaxpipe.models import LanguageModel, TokenLoss
from jaxpipe.models.given import GivenModel
from jaxpipe.models.token_loss import CROSS_ENTROPY
from jaxpipe.training.batches import batches_of, check_learned, padding_of, read_corpus


class Trained(Protocol):
    """A model as the trainer knows it: a `LanguageModel`, or a `given.Model`. `StageFunctions.of` takes the rest."""

    @property
    def has_dropout(self) -> bool:
        """Whether a training step needs a key."""
        ...

    def init(self, key: jax.Array, /) -> Any:
        """Initial canonical parameters, `{"shared": ..., "layers": ...}`, float32."""
        ...

    def num_losses(self, batch: Any, /) -> Any:
        """Number of terms in each sum of the head over a batch, one number for all or one for each; traceable."""
        ...

    def flops(self, batch: Any, /) -> int | None:
        """FLOPs of forward and backward of a batch, leaves [num_microbatches, microbatch size, ...]; None: unknown."""
        ...


class TaskBatches(Protocol):
    """Batches by step: leaves [num_microbatches, microbatch size, ...], the same ones in every process and run."""

    def at(self, step: int, /) -> Batch:
        """The whole batch of `step`, 0 or more."""
        ...

    def following(self, step: int, rows: np.ndarray | None = None, /) -> Generator[Batch, None, None]:
        """Yields the batches of `step`, `step` + 1, ...; only the given rows of each microbatch."""
        ...

    def first(self, num_batches: int, /) -> Iterator[Batch]:
        """Yields at most the first `num_batches` batches, for evaluation."""
        ...


@dataclass(frozen=True)
class Task:
    """The model and the batches of a run.

    Attributes:
        model: the model's functions.
        train_batches: batches of the training data.
        heldout_batches: batches of the held-out data.
        data: one line about the data, for people.
        fingerprint: identifies the data: a run that goes on must have the same.
        loss_unit: what follows a loss in messages, as " nats".
        params: canonical parameters from which the run starts; None: those of `model.init`.
        given: a model given in Python, as estimates know it; None: the config describes the model.
    """

    model: Trained
    train_batches: TaskBatches
    heldout_batches: TaskBatches
    data: str
    fingerprint: Fingerprint
    loss_unit: str = ""
    params: Any = None
    given: GivenModel | None = None


def language_model(config: RunConfig, loss: TokenLoss | None = None) -> LanguageModel:
    """The model of a checked config, for its mesh, with a loss of one's own if there is one."""
    axis = TensorAxis.of(deterministic=config.mesh.deterministic, num_pipe=vocab_pipe(config), **config.mesh.axes)
    return LanguageModel(model_config(config), axis, loss or CROSS_ENTROPY)


def task_of(config: RunConfig, corpus: Corpus | None = None, *, loss: TokenLoss | None = None) -> Task:
    """The task of a checked config.

    Args:
        config: the config; its `pipeline.vocab_over_pipe` is decided.
        corpus: its text, if that is read already.
        loss: a loss of one's own.

    Raises:
        ConfigError: files or the tokenizer are missing, or there is too little text.
        DataError: a prepared file is damaged, or has nothing to learn.
    """
    config = RunConfig.of(config)
    corpus = corpus or read_corpus(config)
    train_batches = batches_of(config, corpus.train)
    heldout_batches = batches_of(config, corpus.heldout)
    check_learned(config, train_batches, heldout_batches)
    return Task(
        language_model(config, loss),
        train_batches=train_batches,
        heldout_batches=heldout_batches,
        data=f"{corpus.num_files} files, {len(corpus.train):,} training tokens, {len(corpus.heldout):,} held out"
        + padding_of(train_batches),
        fingerprint=corpus.fingerprint,
        loss_unit="" if loss else " nats" if family_of(config).masked else " nats per token",
    )
