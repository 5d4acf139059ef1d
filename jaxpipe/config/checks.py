"""The checks of a config, made before anything is read or compiled.

Every check is a function that raises ConfigError for its own rule. `check` runs them in five rounds (family, types,
ranges, schedule, relations), each of which relies on the earlier ones, and reports everything that a round finds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from ml_collections import ConfigDict

from jaxpipe.cluster.assignment import ORDERS
from jaxpipe.cluster.axes import ROWS
from jaxpipe.config.base import AUTO, base_config
from jaxpipe.config.bounds import TOGETHER, check_together, most_of
from jaxpipe.config.costs import check_costs
from jaxpipe.config.data import check_blend, check_masked_sequence, check_prepared_tokenizer, check_vocabulary
from jaxpipe.config.divisibility import check_batch, check_divides
from jaxpipe.config.model import (
    check_attention_kernel,
    check_family,
    check_fields,
    check_words_and_numbers,
    model_config,
)
from jaxpipe.config.pipeline import check_schedule_name, check_vocab_over_pipe, layers_per_stage, outline
from jaxpipe.data.packing import PACKING
from jaxpipe.errors import ConfigError, JaxpipeError, check_choice
from jaxpipe.files import local_path

DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon", "lion", "sgd")
RATES = ("cosine", "wsd", "constant")  # as in jaxpipe.training.optimizer
AT_LEAST_ZERO = (
    "model.embedding_dropout",
    "model.attention_dropout",
    "model.hidden_dropout",
    "model.balance_loss",
    "model.z_loss",
    "model.bias_rate",
    "data.seed",
    "data.short_fraction",
    "pipeline.embedding_layers",
    "pipeline.head_layers",
    "train.seed",
    "optimizer.warmup_fraction",
    "optimizer.warmup_steps",
    "optimizer.final_learning_rate_fraction",
    "optimizer.weight_decay",
    "optimizer.beta1",
    "checkpoint.save_every",
    "checkpoint.keep_every",
    "checkpoint.keep_best",
)

# A factor below 1 would squeeze positions, not stretch them.
AT_LEAST_ONE = ("model.rope_scaling_factor",)

SMALLEST, LARGEST = (float(bound) for bound in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))  # of float32
# Dropout scales what it keeps by 1 / (1 - dropout), Adam's bias correction divides by 1 - beta.
LESS_THAN_ONE = (
    "model.embedding_dropout",
    "model.attention_dropout",
    "model.hidden_dropout",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.muon_beta",
)

Checks = Iterator[Callable[[], object]]


def check(config: ConfigDict, *, name: str = "the config") -> None:
    """Raises ConfigError with every rule that `config` breaks.

    Args:
        config: a config with the fields of `base_config`.
        name: source of the config, for the message.
    """
    _check(config, (_family, _types, _ranges, _schedule, _relations), name=name)


def check_model(config: ConfigDict, *, name: str) -> None:
    """Raises ConfigError with every rule that the model of `config` breaks by itself, whatever it is trained on."""
    _check(config, (_family, _types, _ranges, _model), name=name)


def check_given(config: ConfigDict) -> None:
    """Raises ConfigError with every rule that `config` breaks whose model and batches are given in Python."""
    _check(config, (_types, _ranges, _schedule, _given_relations), name="the config")


def _check(config: ConfigDict, rounds: Sequence[Callable[[ConfigDict], Checks]], *, name: str) -> None:
    # In rounds, since later checks read what earlier ones have made sure: ranges before relations.
    for checks in rounds:
        errors = []
        for check_rule in checks(config):
            try:
                check_rule()
            except JaxpipeError as error:  # collected, so that a user sees all mistakes of a round at once
                errors.append(f"  {error}")
        if errors:
            rules = "1 rule" if len(errors) == 1 else f"{len(errors)} rules"
            raise ConfigError("\n".join([f"{rules} broken in {name}", *errors]))


def _family(config: ConfigDict) -> Checks:
    yield lambda: check_family(config)


def _types(config: ConfigDict) -> Checks:
    for section, fields in base_config(config.model.family).items():
        for field, default in fields.items():
            # Defaults bind the loop's values now; the lambdas run later.
            yield lambda section=section, field=field, default=default: _check_type(config, section, field, default)


def _check_type(config: ConfigDict, section: str, field: str, default: object) -> None:
    value = config[section][field]
    # Not isinstance: True is an int, and 1 is no float to ConfigDict.
    if type(value) is not type(default):
        raise ConfigError(
            f"{section}.{field}={value!r} is of type {type(value).__name__}",
            rule=f"field-type: {section}.{field} is of type {type(default).__name__}",
            repair=f"set {section}.{field} to such a value; its default is {default!r}",
        )


def _ranges(config: ConfigDict) -> Checks:
    values = {f"{section}.{field}": value for section, fields in config.items() for field, value in fields.items()}
    for path, value in values.items():
        if type(value) in (int, float):
            yield lambda path=path, value=value: _check_range(path, value)
    for paths in TOGETHER:
        # A field that is too large by itself has its own error.
        if all(path in values and values[path] <= (most_of(path, values[path]) or math.inf) for path in paths):
            yield lambda paths=paths: check_together(paths, [values[path] for path in paths])
    yield lambda: check_words_and_numbers(config)
    yield lambda: check_choice("model.dtype", config.model.dtype, DTYPES)
    if "packing" in config.data:
        yield lambda: check_choice("data.packing", config.data.packing, PACKING)
    yield lambda: check_choice("optimizer.name", config.optimizer.name, OPTIMIZERS)
    yield lambda: check_choice("optimizer.schedule", config.optimizer.schedule, RATES)
    yield lambda: check_choice("mesh.order", config.mesh.order, (AUTO, *ORDERS))
    yield lambda: check_choice("pipeline.vocab_over_pipe", config.pipeline.vocab_over_pipe, (AUTO, "true", "false"))
    yield lambda: check_schedule_name(config)
    yield lambda: check_costs(config)


def _check_range(path: str, value: float) -> None:
    most = most_of(path, value)
    with np.errstate(over="ignore"):
        # In float32, as the program computes: 1e-50 is 0 there, and 0.99999999 is 1.
        as_computed = float(np.float32(value)) if isinstance(value, float) else value
    if isinstance(value, float) and not math.isfinite(as_computed):  # an int may be too large for a float
        bound = f"a finite number, at most {LARGEST:.1e}"
    elif 0 < value < SMALLEST:
        bound = f"at least {SMALLEST:.1e}" if path not in AT_LEAST_ZERO else f"0, or at least {SMALLEST:.1e}"
    elif value < 0 or (value == 0 and path not in AT_LEAST_ZERO):
        bound = "0 or more" if path in AT_LEAST_ZERO else "1 or more" if isinstance(value, int) else "more than 0"
    elif path in AT_LEAST_ONE and value < 1:
        bound = "1 or more"
    elif most is not None and value > most:
        bound = f"at most {most}"
    elif path in LESS_THAN_ONE and as_computed >= 1:
        bound = "less than 1.0"
    else:
        return
    # Python writes no number of thousands of digits.
    written = value if isinstance(value, float) or abs(value) < 10**100 else f"10^{int(value.bit_length() * 0.30103)}"
    raise ConfigError(f"{path}={written}", rule=f"field-range: {path} is {bound}", repair=f"set {path} to {bound}")


def _schedule(config: ConfigDict) -> Checks:
    yield lambda: outline(config)


def _relations(config: ConfigDict) -> Checks:
    yield lambda: check_vocabulary(config)
    yield lambda: check_blend(config)
    yield lambda: check_prepared_tokenizer(config)
    yield lambda: local_path(config.checkpoint.init_from)
    yield lambda: check_masked_sequence(config)
    yield from _model(config)
    yield lambda: check_attention_kernel(config)
    for row in ROWS:
        yield lambda row=row: check_divides(config, row)
    yield from _given_relations(config)


def _model(config: ConfigDict) -> Checks:
    yield lambda: model_config(config)
    yield lambda: check_fields(config)


def _given_relations(config: ConfigDict) -> Checks:
    """The relations that do not depend on what a model is made of."""
    yield lambda: layers_per_stage(config)
    yield lambda: check_vocab_over_pipe(config)
    yield lambda: check_error_feedback(config)
    yield lambda: check_batch(config)
    yield lambda: check_kept_steps(config)
    yield lambda: check_best(config)
    yield lambda: check_warm_up(config)


def check_error_feedback(config: ConfigDict) -> None:
    """Raises ConfigError for error feedback without a delay."""
    if config.optimizer.error_feedback and not outline(config).delays:
        raise ConfigError(
            f"optimizer.error_feedback=True with pipeline.schedule={config.pipeline.schedule!r}",
            rule="feedback-needs-delay: error feedback corrects gradients of older weights; a flush leaves none",
            repair="set optimizer.error_feedback=False, or pipeline.schedule='pipedream_2bw'",
        )


# ---- What is counted in steps must fit into them: warm-up, and checkpoints that are kept


def check_warm_up(config: ConfigDict) -> None:
    """Raises ConfigError if the learning rate would not reach its peak."""
    warmup = config.optimizer.warmup_steps
    steps = config.train.steps
    if warmup and warmup >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps={warmup} in train.steps={steps}",
            rule="warm-up: it ends before the last step",
            repair=f"set optimizer.warmup_steps={steps // 2}, or train.steps={warmup + 1} or more",
        )


def check_kept_steps(config: ConfigDict) -> None:
    """Raises ConfigError if keep_every names steps at which no checkpoint is saved."""
    every = config.checkpoint.save_every
    kept = config.checkpoint.keep_every
    if kept and (not every or kept % every):
        # `every` at least, as 0 would keep none.
        nearest = max(every, round(kept / every) * every) if every else kept
        repair = f"set checkpoint.keep_every={nearest}" if every else f"set checkpoint.save_every={kept}, or a divisor"
        raise ConfigError(
            f"checkpoint.keep_every={kept} names steps without a checkpoint",
            rule="kept-steps: checkpoint.keep_every is a multiple of checkpoint.save_every",
            picture=f"checkpoint.save_every={every}",
            repair=repair,
        )


def check_best(config: ConfigDict) -> None:
    """Raises ConfigError if keep_best compares checkpoints whose held-out loss is not measured."""
    every = config.checkpoint.save_every
    measured = config.train.eval_every
    if config.checkpoint.keep_best and (not every or every % measured):
        nearest = max(measured, round(every / measured) * measured)
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} for checkpoints without a held-out loss",
            rule="best-checkpoint: checkpoint.save_every is a multiple of train.eval_every",
            picture=f"checkpoint.save_every={every}, train.eval_every={measured}",
            repair=f"set checkpoint.save_every={nearest}",
        )
