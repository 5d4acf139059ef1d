"""A model and batches given in Python become the task of a run, with the same trainer as a config's.

Goes in: functions, initial parameters and batches. Comes out: a `Task`; the config gets their sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import dtypes

from jaxpipe.config.base import RunConfig
from jaxpipe.config.checks import check_given
from jaxpipe.config.model import kind_of_others
from jaxpipe.config.optimizers import OptimizerSection
from jaxpipe.data import Batch, Fingerprint
from jaxpipe.data.fingerprint import SourceFingerprint
from jaxpipe.errors import ConfigError, DataError, first_of
from jaxpipe.models import GIVEN
from jaxpipe.models.given import GivenModel, recomputed
from jaxpipe.training.task import Task

_OPTIMIZER_FIELDS = ("max_grad_norm", "average_decay")  # those that an optimizer given in Python leaves in force
NO_NUMBERS = "OSU"  # kinds of dtypes: objects and texts
GivenBatch = Mapping[str, Any]  # arrays [batch size, ...]
BatchSource = Callable[[int], GivenBatch] | Iterable[GivenBatch]


def num_sequences(batch: Any) -> int:
    """Number of sequences of a batch with leaves [num_microbatches, microbatch size, ...]."""
    num_microbatches, microbatch_size, *_ = jax.tree.leaves(batch)[0].shape
    return num_microbatches * microbatch_size


def no_init(key: jax.Array) -> NoReturn:
    """The `init` of a model whose parameters are given: raises ConfigError."""
    raise _missing("init of the model, or params,")


@dataclass(frozen=True)
class Model:
    """A model of one's own for `jaxpipe.training.fit`.

    Attributes:
        embed, layer, head, embed_backward, head_backward, specs, is_trained: as in `jaxpipe.program.StageFunctions`.
            `random` is None in evaluation.
        init: (key) -> parameters {"shared": ..., "layers": ...}, float32, every leaf of "layers" with a leading dim of
            the number of layers; traceable. By default `fit` is given the parameters.
        num_losses: (batch) -> the number of terms in the head's sum, or one number for each of its sums; the run's loss
            is the sum over it. With losses of layers a dict, the head's only one under "words". A batch has leaves
            [num_microbatches, microbatch size, ...]. By default its sequences.
    """

    embed: Callable[[Any, Any, Any], Any]
    layer: Callable[[Any, Any, Any, Any], Any]
    head: Callable[[Any, Any, Any], Any]
    init: Callable[[jax.Array], Any] = no_init
    num_losses: Callable[[Any], Any] = num_sequences
    embed_backward: Callable[..., Any] | None = None
    head_backward: Callable[..., Any] | None = None
    specs: Any = None
    is_trained: Any = None

    has_dropout = True  # the model may draw; in a step without a draw an unused key is harmless

    def flops(self, batch: Any) -> None:
        """Not known: None."""


def check_nothing_given(**given: Any) -> None:
    """Raises ConfigError for batches or parameters without a model."""
    for argument, value in given.items():
        if value is not None and value != ():
            raise ConfigError(
                f"{argument} is given without a model",
                rule="given-task: a config of a family has its model and its data",
                repair=f"leave {argument} out, or give model=Model(...) and a config of base_config('given')",
            )


def check_optimizer_fields(config: RunConfig) -> None:
    """Raises ConfigError for fields of the config's own optimizer that are set where another one is given."""
    told = vars(config.optimizer)
    for field, default in vars(OptimizerSection()).items():
        if field not in _OPTIMIZER_FIELDS and told[field] != default:
            raise ConfigError(
                f"optimizer.{field}={told[field]} has no effect beside optimizer=...",
                rule="field-used: a field that has no effect is an error",
                picture=f"in force: {', '.join(f'optimizer.{name}' for name in _OPTIMIZER_FIELDS)}",
                repair=f"leave optimizer.{field} out, and give it to the optimizer in Python",
            )


def given_task(
    config: RunConfig, *, model: Model, params: Any, train_batches: BatchSource | None, heldout_batches: BatchSource
) -> tuple[RunConfig, Task]:
    """`config` with the sizes of a model and batches given in Python, checked, and their task.

    Args:
        config: a config of `base_config("given")`.
        model: the model.
        params: canonical parameters to start from; None: those of `model.init`.
        train_batches: batches of the training data: a function of the step, 0 or more, or an iterable whose first
            batch is that of step 0. Dicts of arrays [batch size, ...], the same ones in every process and run.
        heldout_batches: batches of the held-out data, likewise; none: nothing is evaluated.

    Raises:
        ConfigError: a part is missing, or the config contradicts the sizes.
        DataError: a batch is no dict of arrays with one leading dim.
    """
    if train_batches is None:
        raise _missing("train_batches")
    if params is not None:
        model = replace(model, init=lambda key: params)
    like = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    train = _batches(train_batches, "train_batches")
    heldout = _batches(heldout_batches, "heldout_batches")
    example = train.at(0)
    outline = _outline({name: leaf[0] for name, leaf in example.items()})
    train, heldout = (replace(source, like=outline) for source in (train, heldout))
    config = _with_sizes(config, {"model.num_layers": _num_layers(like), "data.batch_size": num_sequences(example)})
    check_given(config)
    # Raises for malformed held-out batches now, not at the first evaluation.
    num_heldout = sum(1 for _ in heldout.first(config.train.eval_batches))
    if config.checkpoint.keep_best and not num_heldout:
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} without heldout_batches",
            rule="best-checkpoint: the best checkpoints are those of the least held-out loss",
            repair="give heldout_batches, or set checkpoint.keep_best=0",
        )
    num_microbatches = config.pipeline.num_microbatches
    # Leaves are [microbatch, sequence, ...].
    sequence = {name: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for name, leaf in example.items()}
    recompute = kind_of_others(config)
    task = Task(
        replace(model, layer=recomputed(model.layer, recompute)),
        train_batches=replace(train, num_microbatches=num_microbatches),
        heldout_batches=replace(heldout, num_microbatches=num_microbatches),
        data=f"given in Python; a batch has {outline}",
        fingerprint=_fingerprint(example),
        params=params,
        given=GivenModel(model, like, sequence, recompute),
    )
    return config, task


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


def _num_layers(params: Any) -> int:
    """The leading dim of all leaves of "layers"."""
    others = [
        f"{jax.tree_util.keystr(path)}: {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if others:
        raise ConfigError(
            "some parameters are no floating-point numbers, and would become some",
            rule="given-params-float: an optimizer moves every parameter; the run keeps them in float32",
            picture=first_of(others),
            repair="put indices, masks and keys into the batch or into the function itself; of a complex parameter"
            " keep real and imaginary part, and join them by jax.lax.complex",
        )
    layers = jax.tree.leaves(params.get("layers")) if isinstance(params, Mapping) else []
    sizes = {leaf.shape[:1] for leaf in layers}
    if len(sizes) != 1 or sizes <= {(), (0,)}:
        raise ConfigError(
            f"the parameters have no one number of layers: {sorted(sizes)}",
            rule="given-params: a dict with 'shared' and 'layers', every leaf of 'layers' [number of layers, ...]",
            repair="stack the parameters of all layers, for example jax.vmap(init_layer)(keys)",
        )
    return sizes.pop()[0]


def _with_sizes(config: RunConfig, sizes: Mapping[str, int]) -> RunConfig:
    """`config` with sizes, by path, where its default 0 stands."""
    told = config.by_path
    for path, size in sizes.items():
        if told[path] not in (0, size):
            raise ConfigError(
                f"{path}={told[path]}, and what is given in Python has {size}",
                rule="given-sizes: the model and the batches decide their sizes",
                repair=f"leave {path} out",
            )
    return config.replaced(sizes)


def _fingerprint(batch: Batch) -> Fingerprint:
    """The fingerprint of the batch of step 1."""
    arrays = sorted(batch.items())
    crc32 = 0
    for name, leaf in arrays:
        crc32 = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), zlib.crc32(name.encode(), crc32))
    num_numbers = sum(leaf.size for _, leaf in arrays)
    return Fingerprint(0, GIVEN, (SourceFingerprint("the batch of step 1", "all", num_numbers, f"{crc32:08x}"),))


def _outline(batch: Batch) -> str:
    """Name, dtype and shape of each array [batch size, ...]."""
    return ", ".join(f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in sorted(batch.items()))


def _missing(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is missing",
        rule="given-task: a model given in Python comes with initial parameters and with batches",
        repair="call fit(config, workdir, model=Model(embed, layer, head, init=init), train_batches=batches)",
    )
