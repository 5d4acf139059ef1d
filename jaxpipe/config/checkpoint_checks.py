"""Rules of `checkpoint`: what is to be kept must be written, and measured, at some time."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxpipe.errors import ConfigError


def check_kept_steps(config: ConfigDict) -> None:
    """Raises ConfigError for steps to keep of which no checkpoint is written."""
    every, kept = config.checkpoint.save_every, config.checkpoint.keep_every
    if kept and (not every or kept % every):
        nearest = max(every, round(kept / every) * every) if every else kept
        repair = f"set checkpoint.keep_every={nearest}" if every else f"set checkpoint.save_every={kept}, or a divisor"
        raise ConfigError(
            f"checkpoint.keep_every={kept} keeps steps of which there is no checkpoint\n"
            "  rule kept-steps: checkpoint.keep_every is a multiple of checkpoint.save_every\n"
            f"      checkpoint.save_every={every}\n"
            f"  repair: {repair}"
        )


def check_best(config: ConfigDict) -> None:
    """Raises ConfigError for a best checkpoint among those whose held-out loss nobody measures."""
    every, measured = config.checkpoint.save_every, config.train.eval_every
    if config.checkpoint.keep_best and (not every or every % measured):
        nearest = max(measured, round(every / measured) * measured)
        raise ConfigError(
            f"checkpoint.keep_best={config.checkpoint.keep_best} of checkpoints without a held-out loss\n"
            "  rule best-checkpoint: checkpoint.save_every is a multiple of train.eval_every\n"
            f"      checkpoint.save_every={every}, train.eval_every={measured}\n"
            f"  repair: set checkpoint.save_every={nearest}"
        )
