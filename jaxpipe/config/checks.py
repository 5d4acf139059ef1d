"""Whether a config can run, found before anything is read or compiled.

Every check is a function that raises ConfigError for its own rule. `check` runs them in three rounds
(types, ranges, relations: the later ones rely on the earlier) and reports all that a round found.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from jaxpipe.config.base import base_config
from jaxpipe.data import VOCAB_SIZE
from jaxpipe.errors import ConfigError, JaxpipeError, closest
from jaxpipe.models import GPTConfig
from jaxpipe.schedules import REGISTRY, Schedule, build

DTYPES = ("float32", "bfloat16")
AT_LEAST_ZERO = (
    "data.seed",
    "train.seed",
    "optimizer.warmup_fraction",
    "optimizer.final_learning_rate_fraction",
    "optimizer.weight_decay",
    "optimizer.beta1",
)

AT_MOST = {
    "data.seed": 2**32 - 1,
    "train.seed": 2**32 - 1,
    "data.heldout_fraction": 0.5,
    "optimizer.warmup_fraction": 0.5,
    "optimizer.final_learning_rate_fraction": 1.0,
}
LESS_THAN = {"optimizer.beta1": 1.0, "optimizer.beta2": 1.0}  # 1 divides by zero in Adam's bias correction


def check(config: ConfigDict, *, name: str = "the config") -> None:
    """Raises ConfigError with everything in `config` that cannot run.

    Args:
        config: fields as in `base_config`.
        name: where it comes from, for the message.
    """
    for checks in (_types, _ranges, _relations):
        found = []
        for one in checks(config):
            try:
                one()
            except JaxpipeError as error:
                found.append(f"  {error}")
        if found:
            rules = "1 rule" if len(found) == 1 else f"{len(found)} rules"
            raise ConfigError("\n".join([f"{rules} broken in {name}", *found]))


def gpt_config(config: ConfigDict) -> GPTConfig:
    """The model's part of a config, with as many positions as a sequence has tokens."""
    model = config.model
    return GPTConfig(
        num_layers=model.num_layers,
        hidden=model.hidden,
        num_heads=model.num_heads,
        vocab_size=model.vocab_size,
        seq_len=config.data.seq_len,
        tie_embeddings=model.tie_embeddings,
        attention=model.attention,
        recompute=model.recompute,
    )


def build_schedule(config: ConfigDict) -> Schedule:
    """The schedule that `pipeline` and `mesh.pipe` ask for."""
    pipeline = config.pipeline
    options = {"num_chunks": pipeline.num_chunks} if _takes_chunks(pipeline.schedule) else {}
    return build(pipeline.schedule, num_devices=config.mesh.pipe, num_microbatches=pipeline.num_microbatches, **options)


def _types(config: ConfigDict) -> Iterator[Callable[[], None]]:
    for section, fields in base_config().items():
        for field, default in fields.items():
            yield lambda section=section, field=field, default=default: _check_type(config, section, field, default)


def _check_type(config: ConfigDict, section: str, field: str, default: object) -> None:
    value = config[section][field]
    if type(value) is not type(default):
        raise ConfigError(
            f"{section}.{field}={value!r} is of type {type(value).__name__}\n"
            f"  rule field-type: {section}.{field} is of type {type(default).__name__}\n"
            f"  repair: set {section}.{field} to such a value; its default is {default!r}"
        )


def _ranges(config: ConfigDict) -> Iterator[Callable[[], None]]:
    for section, fields in config.items():
        for field, value in fields.items():
            if type(value) in (int, float):
                yield lambda path=f"{section}.{field}", value=value: _check_range(path, value)
    yield lambda: _check_choice("model.dtype", config.model.dtype, DTYPES)
    yield lambda: _check_choice("pipeline.schedule", config.pipeline.schedule, tuple(REGISTRY))


def _check_range(path: str, value: float) -> None:
    if not math.isfinite(value):
        bound = "a finite number"
    elif value < 0 or (value == 0 and path not in AT_LEAST_ZERO):
        bound = "0 or more" if path in AT_LEAST_ZERO else "1 or more" if isinstance(value, int) else "more than 0"
    elif path in AT_MOST and value > AT_MOST[path]:
        bound = f"at most {AT_MOST[path]}"
    elif path in LESS_THAN and value >= LESS_THAN[path]:
        bound = f"less than {LESS_THAN[path]}"
    else:
        return
    raise ConfigError(f"{path}={value}\n  rule field-range: {path} is {bound}\n  repair: set {path} to {bound}")


def _check_choice(path: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"{path}={value!r} is not known.{closest(value, list(known))}\n"
            f"  rule field-choice: {path} is one of {', '.join(sorted(known))}\n"
            f"  repair: set {path} to one of these"
        )


def _relations(config: ConfigDict) -> Iterator[Callable[[], None]]:
    yield lambda: _check_vocabulary(config)
    yield lambda: _check_model(config)
    yield lambda: _check_tensor(config)
    yield lambda: _check_chunks(config)
    yield lambda: _check_stages(config)
    yield lambda: _check_batch(config)


def _check_vocabulary(config: ConfigDict) -> None:
    if config.model.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokens there are\n"
            f"  rule vocabulary: a token is a byte, 0 .. {VOCAB_SIZE - 1}\n"
            f"  repair: set model.vocab_size={VOCAB_SIZE}"
        )


def _check_model(config: ConfigDict) -> None:
    gpt_config(config)


def _check_tensor(config: ConfigDict) -> None:
    if config.mesh.tensor > 1:
        raise ConfigError(
            f"mesh.tensor={config.mesh.tensor}\n"
            "  rule tensor-axis: layers cannot be split over devices yet\n"
            "  repair: set mesh.tensor=1 and a larger mesh.pipe or mesh.data"
        )


def _check_chunks(config: ConfigDict) -> None:
    name, num_chunks = config.pipeline.schedule, config.pipeline.num_chunks
    if num_chunks > 1 and not _takes_chunks(name):
        raise ConfigError(
            f"pipeline.num_chunks={num_chunks} has no effect on pipeline.schedule={name!r}\n"
            f"  rule schedule-chunks: {name!r} has one stage on each device\n"
            "  repair: set pipeline.num_chunks=1"
        )


def _check_stages(config: ConfigDict) -> None:
    num_stages = config.mesh.pipe * config.pipeline.num_chunks
    if num_stages > config.model.num_layers:
        raise ConfigError(
            f"{num_stages} stages for model.num_layers={config.model.num_layers}\n"
            "  rule layer-per-stage: every stage holds at least one layer\n"
            f"      mesh.pipe={config.mesh.pipe} x pipeline.num_chunks={config.pipeline.num_chunks} = {num_stages}\n"
            f"  repair: set mesh.pipe={max(1, config.model.num_layers // config.pipeline.num_chunks)} or less,"
            f" or model.num_layers={num_stages} or more"
        )


def _check_batch(config: ConfigDict) -> None:
    batch_size = config.data.batch_size
    num_parts = config.pipeline.num_microbatches * config.mesh.data
    remainder = batch_size % num_parts
    if remainder:
        lower, upper = batch_size - remainder, batch_size - remainder + num_parts
        nearest = upper if not lower or upper - batch_size < remainder else lower
        raise ConfigError(
            f"data.batch_size={batch_size} does not divide into"
            f" pipeline.num_microbatches={config.pipeline.num_microbatches} x mesh.data={config.mesh.data}"
            f" = {num_parts} equal parts\n"
            "  rule batch-divides: every device gets as many sequences of every microbatch\n"
            f"      {batch_size} = {num_parts} x {batch_size // num_parts} + {remainder}\n"
            f"  repair: set data.batch_size={nearest}, the nearest legal value"
        )


def _takes_chunks(schedule: str) -> bool:
    return "num_chunks" in inspect.signature(REGISTRY[schedule]).parameters
