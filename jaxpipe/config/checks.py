"""The checks of a config, made before anything is read or compiled.

Every check is a function that raises ConfigError for its own rule. `check` runs them in five rounds (family, types,
ranges, schedule, relations), each of which relies on the earlier ones, and reports everything that a round finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import inf

from ml_collections import ConfigDict

from jaxpipe.cluster.axes import ROWS
from jaxpipe.config.base import RunConfig, base_config, legal_of
from jaxpipe.config.costs import check_costs
from jaxpipe.config.data import check_blend, check_masked_sequence, check_prepared_tokenizer, check_vocabulary
from jaxpipe.config.divisibility import check_batch, check_divides, check_sequences
from jaxpipe.config.legal import TOGETHER, check_together
from jaxpipe.config.model import (
    check_attention_kernel,
    check_family,
    check_fields,
    check_words_and_numbers,
    model_config,
)
from jaxpipe.config.pipeline import (
    check_head_layer,
    check_kinds,
    check_overlap,
    check_schedule_name,
    check_vocab_over_pipe,
    layers_per_stage,
    outline,
)
from jaxpipe.config.recompute import check_recompute
from jaxpipe.config.sharing import check_kept, check_shard
from jaxpipe.errors import ConfigError, JaxpipeError
from jaxpipe.files import local_path

Check = Callable[[RunConfig], object]


def _check_type(path: str, value: object, default: object) -> None:
    # Not isinstance: True is an int, and 1 is no float to ConfigDict.
    if type(value) is not type(default):
        raise ConfigError(
            f"{path}={value!r} is of type {type(value).__name__}",
            rule=f"field-type: {path} is of type {type(default).__name__}",
            repair=f"set {path} to such a value; its default is {default!r}",
        )


def check_error_feedback(config: RunConfig) -> None:
    """Raises ConfigError for error feedback without a delay."""
    if config.optimizer.error_feedback and not outline(config).delays:
        raise ConfigError(
            f"optimizer.error_feedback=True with pipeline.schedule={config.pipeline.schedule!r}",
            rule="feedback-needs-delay: error feedback corrects gradients of older weights; a flush leaves none",
            repair="set optimizer.error_feedback=False, or pipeline.schedule='pipedream_2bw'",
        )


def check_lora(config: RunConfig) -> None:
    """Raises ConfigError for what adapters do not go together with."""
    rank = getattr(config.model, "lora_rank", 0)
    if not rank:
        return
    others = (
        (
            bool(outline(config).delays),
            f"pipeline.schedule={config.pipeline.schedule!r}",
            "without flush every parameter has two versions and an update of its own",
            "pipeline.schedule='1f1b'",
        ),
        (
            config.optimizer.name == "muon",
            "optimizer.name='muon'",
            "Muon is for the kernels of layers, which are frozen",
            "optimizer.name='adamw'",
        ),
        (
            getattr(config.model, "bias_rate", 0.0) > 0,
            f"model.bias_rate={getattr(config.model, 'bias_rate', 0.0)}",
            "the biases of experts are frozen, too",
            "model.bias_rate=0.0",
        ),
    )
    for is_there, what, why, repair in others:
        if is_there:
            raise ConfigError(
                f"model.lora_rank={rank} with {what}",
                rule=f"lora-alone: with adapters all other parameters are frozen; {why}",
                repair=f"set {repair}, or model.lora_rank=0",
            )


# ---- What is counted in steps must fit into them: warm-up, and checkpoints that are kept


def check_warm_up(config: RunConfig) -> None:
    """Raises ConfigError if the learning rate would not reach its peak."""
    warmup = config.optimizer.warmup_steps
    steps = config.train.steps
    if warmup and warmup >= steps:
        raise ConfigError(
            f"optimizer.warmup_steps={warmup} in train.steps={steps}",
            rule="warm-up: it ends before the last step",
            repair=f"set optimizer.warmup_steps={steps // 2}, or train.steps={warmup + 1} or more",
        )


def check_kept_steps(config: RunConfig) -> None:
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


def check_best(config: RunConfig) -> None:
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


# ---- Which checks are made, and in which order


def _types(config: RunConfig) -> Iterator[Check]:
    values = config.by_path
    for path, default in RunConfig.of(base_config(config.model.family)).by_path.items():
        # Defaults bind the loop's values now; the lambdas run later.
        yield lambda _, path=path, default=default: _check_type(path, values[path], default)


def _ranges(config: RunConfig) -> Iterator[Check]:
    values = config.by_path
    for path, value in values.items():
        yield lambda _, path=path, value=value: legal_of(path).check(path, value)
    for paths in TOGETHER:
        # A field that is too large by itself has its own error.
        if all(path in values and values[path] <= (legal_of(path).most_of(values[path]) or inf) for path in paths):
            yield lambda _, paths=paths: check_together(paths, values)
    yield from (check_words_and_numbers, check_schedule_name, check_costs)


_OF_MODEL: tuple[Check, ...] = (model_config, check_fields)
# The relations that do not depend on what a model is made of.
_OF_GIVEN: tuple[Check, ...] = (
    layers_per_stage,
    check_vocab_over_pipe,
    check_overlap,
    check_recompute,
    check_error_feedback,
    check_shard,
    check_kept,
    check_lora,
    check_batch,
    check_kept_steps,
    check_best,
    check_warm_up,
)
_RELATIONS: tuple[Check, ...] = (
    check_vocabulary,
    check_blend,
    check_prepared_tokenizer,
    lambda config: local_path(config.checkpoint.init_from),
    check_masked_sequence,
    *_OF_MODEL,
    check_attention_kernel,
    *(partial(check_divides, row=row) for row in ROWS),
    check_sequences,
    *_OF_GIVEN,
    check_head_layer,
    check_kinds,
)
# A round is its checks, or finds them in the config.
Round = Sequence[Check] | Callable[[RunConfig], Iterable[Check]]


def check(config: ConfigDict | RunConfig, *, name: str = "the config") -> None:
    """Raises ConfigError with every rule that `config` breaks.

    Args:
        config: a config with the fields of `base_config`.
        name: source of the config, for the message.
    """
    _check(config, ((check_family,), _types, _ranges, (outline,), _RELATIONS), name=name)


def check_model(config: ConfigDict | RunConfig, *, name: str) -> None:
    """Raises ConfigError with every rule that the model of `config` breaks by itself, whatever it is trained on."""
    _check(config, ((check_family,), _types, _ranges, _OF_MODEL), name=name)


def check_given(config: RunConfig) -> None:
    """Raises ConfigError with every rule that `config` breaks whose model and batches are given in Python."""
    _check(config, (_types, _ranges, (outline,), _OF_GIVEN), name="the config")


def _check(config: ConfigDict | RunConfig, rounds: Sequence[Round], *, name: str) -> None:
    config = RunConfig.of(config)
    # In rounds, since later checks read what earlier ones have made sure: ranges before relations.
    for checks in rounds:
        errors = []
        for check_rule in checks(config) if callable(checks) else checks:
            try:
                check_rule(config)
            except JaxpipeError as error:  # collected, so that a user sees all mistakes of a round at once
                errors.append(f"  {error}")
        if errors:
            rules = "1 rule" if len(errors) == 1 else f"{len(errors)} rules"
            raise ConfigError("\n".join([f"{rules} broken in {name}", *errors]))
