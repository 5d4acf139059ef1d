"""Batches that are given in Python: checked, and cut into microbatches.

In goes a function of the step, or an iterable of dicts of arrays; out come `TaskBatches`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import jax
import numpy as np
from jax import dtypes

from jaxpipe.data import Batch
from jaxpipe.errors import ConfigError, DataError

NO_NUMBERS = "OSU"  # kinds of dtypes: objects and texts
GivenBatch = Mapping[str, Any]  # arrays [batch size, ...]
BatchSource = Callable[[int], GivenBatch] | Iterable[GivenBatch]


def num_sequences(batch: Any) -> int:
    """Number of sequences of a batch with leaves [num_microbatches, microbatch size, ...]."""
    num_microbatches, microbatch_size, *_ = jax.tree.leaves(batch)[0].shape
    return num_microbatches * microbatch_size


def batches_like_the_first(
    train_batches: BatchSource, heldout_batches: BatchSource
) -> tuple[GivenBatches, GivenBatches, Batch]:
    """Batches in one microbatch that must be like the first one for training, which comes third."""
    train = _batches(train_batches, "train_batches")
    heldout = _batches(heldout_batches, "heldout_batches")
    example = train.at(0)
    outline = _outline({name: leaf[0] for name, leaf in example.items()})
    return replace(train, like=outline), replace(heldout, like=outline), example


@dataclass(frozen=True)
class GivenBatches:
    """Batches that a user gives, cut into microbatches; a `TaskBatches`.

    Attributes:
        source: a function of the step, or an iterable that begins anew each time.
        num_microbatches: microbatches of a step.
        name: what errors call it.
        like: the outline that every batch has; None: any.
    """

    source: BatchSource
    num_microbatches: int
    name: str
    like: str | None = None

    def at(self, step: int) -> Batch:
        """The whole batch of `step`."""
        return next(self.following(step))

    def following(self, step: int, rows: np.ndarray | None = None) -> Generator[Batch, None, None]:
        """Yields the batches of `step`, `step` + 1, ...; only the given rows of each microbatch.

        Raises:
            DataError: the batches end, or one is no dict of arrays with one leading dim, or unlike the first.
        """
        for batch in self._from(step):
            yield batch if rows is None else {name: leaf[:, rows] for name, leaf in batch.items()}
            step += 1
        raise DataError(
            f"{self.name} has no batch for step {step + 1}",
            rule="given-batches: there is a batch for every step of the run",
            repair="give a function of the step, or an iterable without end, or set train.steps to fewer",
        )

    def first(self, num_batches: int) -> Iterator[Batch]:
        """Yields at most the first `num_batches` batches."""
        yield from islice(self._from(0), num_batches)

    def _from(self, step: int) -> Iterator[Batch]:
        if callable(self.source):
            batches: Iterator[GivenBatch] = map(self.source, count(step))
        else:
            batches = islice(self.source, step, None)
        for number, batch in enumerate(batches, start=step):
            where = f"{self.name}, batch {number + 1}"
            arrays = self._arrays(batch, where)
            if self.like not in (None, _outline(arrays)):
                raise DataError(
                    f"{where}: this batch has other shapes than the first one for training",
                    rule="given-batch: all batches have the same names, shapes and dtypes, held-out ones too",
                    picture=f"the first: {self.like}\nthis one:  {_outline(arrays)}",
                    repair="leave out a last batch that is shorter, or fill it up",
                )
            num = self.num_microbatches
            yield {name: leaf.reshape(num, len(leaf) // num, *leaf.shape[1:]) for name, leaf in arrays.items()}

    def _arrays(self, batch: GivenBatch, where: str) -> Batch:
        """The arrays of a batch in the dtypes that JAX computes with."""
        arrays = {name: np.asarray(leaf) for name, leaf in batch.items()} if isinstance(batch, Mapping) else {}
        sizes = {leaf.shape[:1] for leaf in arrays.values()}
        if len(sizes) != 1 or sizes == {()} or any(leaf.dtype.kind in NO_NUMBERS for leaf in arrays.values()):
            raise DataError(
                f"{where}: this is no batch",
                rule="given-batch: a dict of arrays [batch size, ...], all of one batch size",
                picture=_outline(arrays) or f"found {type(batch).__name__}",
                repair="return such a dict",
            )
        return {name: leaf.astype(dtypes.canonicalize_dtype(leaf.dtype), copy=False) for name, leaf in arrays.items()}


def _batches(source: BatchSource, name: str) -> GivenBatches:
    """Batches in one microbatch.

    Raises:
        ConfigError: the source can be read only once.
    """
    if not callable(source) and (not isinstance(source, Iterable) or isinstance(source, Iterator)):
        raise ConfigError(
            f"{name} is a {type(source).__name__}, which cannot be read from its beginning again",
            rule="given-batches: batches are a function of the step or an iterable that begins anew each time, so"
            " that a run can go on after any step",
            repair="give for example lambda step: ..., a list, or a data loader",
        )
    return GivenBatches(source, num_microbatches=1, name=name)


def _outline(batch: Batch) -> str:
    """Name, dtype and shape of each array [batch size, ...]."""
    return ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in sorted(batch.items()))
