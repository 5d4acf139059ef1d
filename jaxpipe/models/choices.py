"""What the model families choose from alike: how to attend, what to compute again in backward."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxpipe.errors import ConfigError, closest
from jaxpipe.models.attention import ATTENTION

RECOMPUTE = ("none", "attention", "full")


def attend_of(attention: str, recompute: str) -> Callable:
    """The attention function, which keeps no scores and probabilities where `recompute` says so."""
    attend = ATTENTION[attention]
    return jax.checkpoint(attend, prevent_cse=False) if recompute == "attention" else attend


def check_heads(*, hidden: int, num_heads: int) -> None:
    """Raises ConfigError unless the stream divides into heads."""
    if hidden % num_heads:
        lower = hidden - hidden % num_heads
        nearest = lower or num_heads
        raise ConfigError(
            f"model.hidden={hidden} does not divide into model.num_heads={num_heads} heads\n"
            "  rule hidden-per-head: hidden is a multiple of num_heads\n"
            f"      {hidden} = {num_heads} x {hidden // num_heads} + {hidden % num_heads}\n"
            f"  repair: set model.hidden={nearest} (the nearest below) or {lower + num_heads}"
        )


def check_choices(*, attention: str, recompute: str) -> None:
    """Raises ConfigError for a choice that is not known, or that another makes useless."""
    for name, value, known in (("attention", attention, tuple(ATTENTION)), ("recompute", recompute, RECOMPUTE)):
        if value not in known:
            raise ConfigError(
                f"model.{name}={value!r} is not known.{closest(value, list(known))}\n"
                f"  rule model-{name}: one of {', '.join(known)}\n"
                f"  repair: set model.{name}={known[0]!r}"
            )
    if recompute == "attention" and attention != "xla":
        raise ConfigError(
            f"model.recompute='attention' with model.attention={attention!r}\n"
            "  rule recompute-attention: it leaves out the scores and probabilities, which only 'xla' keeps\n"
            f"  repair: set model.recompute='none'; {attention!r} keeps as little"
        )
