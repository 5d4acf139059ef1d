"""A model and batches given in Python become the task of a run, with the same trainer as a config's.

Goes in: functions, initial parameters and batches. Comes out: a `Task`; the config gets their sizes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.config.base import RunConfig
from jaxpipe.config.checks import check_given
from jaxpipe.config.model import kind_of_others
from jaxpipe.config.optimizers import OptimizerSection
from jaxpipe.data import Batch, Fingerprint
from jaxpipe.data.fingerprint import SourceFingerprint
from jaxpipe.errors import ConfigError, first_of
from jaxpipe.layer_kinds import ONE_KIND, Pattern
from jaxpipe.models import GIVEN, TokenLoss
from jaxpipe.models.given import GivenModel, recomputing
from jaxpipe.training.given_batches import BatchSource, GivenBatches, batches_like_the_first, num_sequences
from jaxpipe.training.task import Task, language_model

_OPTIMIZER_FIELDS = ("max_grad_norm", "average_decay")  # those that an optimizer given in Python leaves in force


def no_init(key: jax.Array) -> NoReturn:
    """The `init` of a model whose parameters are given: raises ConfigError."""
    raise _missing("init of the model, or params,")


@dataclass(frozen=True)
class Model:
    """A model of one's own for `jaxpipe.training.fit`.

    Attributes:
        embed, layer, head, embed_backward, head_backward, head_values, specs, is_trained, other_layers, pattern: as in
            `jaxpipe.program.StageFunctions`. `random` is None in evaluation.
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
    head_values: Callable[..., Any] | None = None
    specs: Any = None
    is_trained: Any = None
    other_layers: tuple[Callable[[Any, Any, Any, Any], Any], ...] = ()
    pattern: Pattern = ONE_KIND

    has_dropout = True  # the model may draw; in a step without a draw an unused key is harmless

    def flops(self, batch: Any) -> None:
        """Not known: None."""


@dataclass(frozen=True)
class Given:
    """What is given in Python beside a config of a family.

    Attributes:
        loss: the loss of words; None: their cross entropy.
        train_batches, heldout_batches: batches, as to `fit`; None and none: those of the config's data.
    """

    loss: TokenLoss | None = None
    train_batches: BatchSource | None = None
    heldout_batches: BatchSource = ()

    def task(self, config: RunConfig) -> Task:
        """The task of a checked config of a family with these batches.

        Raises:
            ConfigError: the config has other sizes than the batches, or the loss and the batches do not fit.
            DataError: a batch is no dict of arrays with one leading dim.
        """
        assert self.train_batches is not None
        train, heldout, example = batches_like_the_first(self.train_batches, self.heldout_batches)
        missing = {"tokens", "targets"} - set(example)
        if missing:
            raise ConfigError(
                f"train_batches have no {', '.join(sorted(missing))}",
                rule="token-batches: a language model reads tokens, and predicts targets, -1 where there is none",
                picture=f"a batch has {train.like}",
                repair="make batches by jaxpipe.training.token_batch",
            )
        sizes = {"data.batch_size": num_sequences(example), "data.seq_len": example["tokens"].shape[-1]}
        config = _with_sizes(config, sizes)
        _check_heldout(config, heldout)
        return _task(config, language_model(config, self.loss), train, heldout, example)


NOTHING_GIVEN = Given()


def check_no_model(**given: Any) -> None:
    """Raises ConfigError for parameters, or held-out batches alone, without a model."""
    for argument, value in given.items():
        if value is not None and value != ():
            raise ConfigError(
                f"{argument} is given without a model",
                rule="given-task: a config of a family has its model, and its data unless train_batches are given",
                repair=f"leave {argument} out, or give model=Model(...) and a config of base_config('given')",
            )


def check_no_loss(loss: TokenLoss | None) -> None:
    """Raises ConfigError for a loss beside a model of one's own."""
    if loss is not None:
        raise ConfigError(
            "loss is given with a model",
            rule="own-loss: a model given in Python ends in a loss of its own, its head",
            repair="leave loss out, and let the head return it: jaxpipe.models.token_values makes what it takes",
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
    train, heldout, example = batches_like_the_first(train_batches, heldout_batches)
    config = _with_sizes(
        config, {"model.num_layers": _num_layers(like, model.pattern), "data.batch_size": num_sequences(example)}
    )
    check_given(config)
    _check_heldout(config, heldout)
    # Leaves are [microbatch, sequence, ...].
    sequence = {name: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype) for name, leaf in example.items()}
    recompute = kind_of_others(config)
    task = _task(config, recomputing(model, recompute), train, heldout, example)
    return config, replace(task, params=params, given=GivenModel(model, like, sequence, recompute))


def _task(config: RunConfig, model: Any, train: GivenBatches, heldout: GivenBatches, example: Batch) -> Task:
    num_microbatches = config.pipeline.num_microbatches
    return Task(
        model,
        train_batches=replace(train, num_microbatches=num_microbatches),
        heldout_batches=replace(heldout, num_microbatches=num_microbatches),
        data=f"given in Python; a batch has {train.like}",
        fingerprint=_fingerprint(example),
    )


def _check_heldout(config: RunConfig, heldout: GivenBatches) -> None:
    """Raises ConfigError if there are none and some are needed, DataError for malformed ones."""
    # Now, not at the first evaluation.
    num_heldout = sum(1 for _ in heldout.first(config.train.eval_batches))
    if config.checkpoint.keep_best and not num_heldout:
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} without heldout_batches",
            rule="best-checkpoint: the best checkpoints are those of the least held-out loss",
            repair="give heldout_batches, or set checkpoint.keep_best=0",
        )


def _num_layers(params: Any, pattern: Pattern) -> int:
    """The leading dim of all leaves of "layers"; of kinds with other parameters the sum of theirs."""
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
    if pattern.only and layers:
        of_names = {name: {leaf.shape[:1] for leaf in jax.tree.leaves(of)} for name, of in params["layers"].items()}
        num_rows = {name: num for name, sizes in of_names.items() for (num,) in sizes}
        num = pattern.num_layers(num_rows) if all(len(sizes) == 1 for sizes in of_names.values()) else None
        if num is None:
            raise ConfigError(
                f"the parameters of layers have {num_rows} rows, with pattern.only={pattern.only}",
                rule="given-params: parameters that some kinds of layers alone have, have a row for each such layer",
                repair="stack those of each kind apart, and all others over all layers",
            )
        return num
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
                repair=f"set {path}={size}",
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


def _missing(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is missing",
        rule="given-task: a model given in Python comes with initial parameters and with batches",
        repair="call fit(config, workdir, model=Model(embed, layer, head, init=init), train_batches=batches)",
    )
