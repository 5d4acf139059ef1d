"""Whether a config can run, found before anything is read or compiled.

Every check is a function that raises ConfigError for its own rule. `check` runs them in four rounds
(family, types, ranges, relations: the later ones rely on the earlier) and reports all that a round found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ml_collections import ConfigDict

from jaxpipe.cluster.assignment import ORDERS
from jaxpipe.config.base import AUTO, base_config
from jaxpipe.config.checkpoint_checks import check_best, check_kept_steps
from jaxpipe.config.choice import check_choice
from jaxpipe.config.costs import check_costs
from jaxpipe.config.data_checks import check_blend, check_masked_sequence, check_vocabulary
from jaxpipe.config.mesh_checks import check_batch, check_tensor
from jaxpipe.config.model import (
    check_attention_kernel,
    check_family,
    check_fields,
    check_words_and_numbers,
    model_config,
)
from jaxpipe.config.schedules import build_schedule, check_schedule_name
from jaxpipe.config.stages import layers_per_stage
from jaxpipe.errors import ConfigError, JaxpipeError

DTYPES = ("float32", "bfloat16")
AT_LEAST_ZERO = (
    "model.embedding_dropout",
    "model.attention_dropout",
    "model.hidden_dropout",
    "data.seed",
    "data.short_fraction",
    "pipeline.embedding_layers",
    "pipeline.head_layers",
    "train.seed",
    "optimizer.warmup_fraction",
    "optimizer.final_learning_rate_fraction",
    "optimizer.weight_decay",
    "optimizer.beta1",
    "checkpoint.save_every",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
)

AT_LEAST_ONE = ("model.rope_scaling_factor",)

AT_MOST = {
    "data.seed": 2**32 - 1,
    "train.seed": 2**32 - 1,
    "data.heldout_fraction": 0.5,
    "data.mask_fraction": 1.0,
    "data.short_fraction": 1.0,
    "optimizer.warmup_fraction": 0.5,
    "optimizer.final_learning_rate_fraction": 1.0,
}

# What is kept is scaled by 1 / (1 - dropout), Adam's bias correction by 1 / (1 - beta).
LESS_THAN_ONE = (
    "model.embedding_dropout",
    "model.attention_dropout",
    "model.hidden_dropout",
    "optimizer.beta1",
    "optimizer.beta2",
)

Checks = Iterator[Callable[[], object]]


def check(config: ConfigDict, *, name: str = "the config") -> None:
    """Raises ConfigError with everything in `config` that cannot run.

    Args:
        config: fields as in `base_config`.
        name: where it comes from, for the message.
    """
    for checks in (_family, _types, _ranges, _schedule, _relations):
        found = []
        for one in checks(config):
            try:
                one()
            except JaxpipeError as error:
                found.append(f"  {error}")
        if found:
            rules = "1 rule" if len(found) == 1 else f"{len(found)} rules"
            raise ConfigError("\n".join([f"{rules} broken in {name}", *found]))


def _family(config: ConfigDict) -> Checks:
    yield lambda: check_family(config)


def _types(config: ConfigDict) -> Checks:
    for section, fields in base_config(config.model.family).items():
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


def _ranges(config: ConfigDict) -> Checks:
    for section, fields in config.items():
        for field, value in fields.items():
            if type(value) in (int, float):
                yield lambda path=f"{section}.{field}", value=value: _check_range(path, value)
    yield lambda: check_words_and_numbers(config)
    yield lambda: check_choice("model.dtype", config.model.dtype, DTYPES)
    yield lambda: check_choice("mesh.order", config.mesh.order, (AUTO, *ORDERS))
    yield lambda: check_schedule_name(config)
    yield lambda: check_costs(config)


def _check_range(path: str, value: float) -> None:
    if not math.isfinite(value):
        bound = "a finite number"
    elif value < 0 or (value == 0 and path not in AT_LEAST_ZERO):
        bound = "0 or more" if path in AT_LEAST_ZERO else "1 or more" if isinstance(value, int) else "more than 0"
    elif path in AT_LEAST_ONE and value < 1:
        bound = "1 or more"
    elif path in AT_MOST and value > AT_MOST[path]:
        bound = f"at most {AT_MOST[path]}"
    elif path in LESS_THAN_ONE and value >= 1:
        bound = "less than 1.0"
    else:
        return
    raise ConfigError(f"{path}={value}\n  rule field-range: {path} is {bound}\n  repair: set {path} to {bound}")


def _schedule(config: ConfigDict) -> Checks:
    yield lambda: build_schedule(config)


def _relations(config: ConfigDict) -> Checks:
    yield lambda: check_vocabulary(config)
    yield lambda: check_blend(config)
    yield lambda: check_masked_sequence(config)
    yield lambda: model_config(config)
    yield lambda: check_fields(config)
    yield lambda: check_attention_kernel(config)
    yield lambda: check_tensor(config)
    yield lambda: layers_per_stage(config)
    yield lambda: check_batch(config)
    yield lambda: check_kept_steps(config)
    yield lambda: check_best(config)
