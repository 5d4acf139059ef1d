"""Choices of the model families: sizes, activation, attention, recomputation.

Gated activations, of two matmuls, belong to their family (`llama.swiglu`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.errors import ConfigError, closest
from jaxpipe.models.attention import ATTENTION, KEPT, AttentionDropout, Visible


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU in its form with tanh, as GPT-2's; source: Hendrycks and Gimpel 2016, section 2."""
    return jax.nn.gelu(x, approximate=True)


def gelu(x: jax.Array) -> jax.Array:
    """GELU by the error function, as BERT's; source: Hendrycks and Gimpel 2016, section 2."""
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "relu": jax.nn.relu,
}


NOTHING = "none"  # that backward computes again
RECOMPUTE = (NOTHING, "attention", "full")

# Fields of `model` that every family has.
TOKENS = {
    "vocab_size": 256,  # tokens are 0 .. vocab_size - 1; bytes are 256
    "vocab_multiple": 128,  # the token table has a multiple of so many rows; those beyond the tokens do nothing
}
CHOICES = {
    "attention": "xla",  # how a layer attends: a key of jaxpipe.models.attention.ATTENTION
    # What backward computes again: "none", "attention", "full"; "full:4,3,2,0": of each stage so many first layers, one
    # count a stage, or a device; "auto:70GiB": as few as keep the bytes of a device, with those of the first stages.
    "recompute": NOTHING,
    "dtype": "float32",  # of compute and activations: "float32", "bfloat16"; the state is float32
}
DROPOUTS = {
    "embedding_dropout": 0.0,  # the part, in [0, 1), that training drops of the embeddings,
    "attention_dropout": 0.0,  # of the attention probabilities,
    "hidden_dropout": 0.0,  # and of what a layer adds to the residual stream
}


def attend_of(attention: str, recompute: str) -> Callable:
    """Attention function of a model, which saves no scores and probabilities with recompute="attention"."""
    attend = ATTENTION[attention]
    # prevent_cse=False: a layer's forward and backward are never in one loop body, so nothing can be merged.
    return jax.checkpoint(attend, prevent_cse=False) if recompute == "attention" else attend


def attend_normed_of(attention: str, recompute: str) -> Callable:
    """As `attend_of`, for queries and keys that norms and positions first prepare; backward does that again.

    Returns:
        (prepare, query, key, value, (norm of queries, norm of keys), visible, dropout) -> attended values, where
        `prepare` is (queries or keys, norm) -> the same, prepared. With cuDNN what is prepared is saved too.
    """

    def attend(
        prepare: Callable,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        norms: tuple[Any, Any],
        visible: Visible,
        dropout: AttentionDropout | None,
    ) -> jax.Array:
        query, key = (prepare(x, norm) for x, norm in zip((query, key), norms, strict=True))
        return ATTENTION[attention](query, key, value, visible=visible, dropout=dropout)

    if attention == "cudnn":
        # What it saves, the prepared among it, carries no name: by name none would be kept and its kernel would run
        # again. So only the preparation does.
        return lambda prepare, *others: attend(jax.checkpoint(prepare, prevent_cse=False), *others)
    # No policy saves nothing.
    policy = None if recompute == "attention" else jax.checkpoint_policies.save_only_these_names(KEPT)
    # `prepare` is a function and so static.
    return jax.checkpoint(attend, prevent_cse=False, static_argnums=0, policy=policy)


def num_token_rows(vocab_size: int, multiple: int) -> int:
    """Rows of a token table for `vocab_size` tokens: the next multiple of `multiple`.

    Source: Megatron-LM's make-vocab-size-divisible-by.

    Example:
        >>> num_token_rows(50257, 128)
        50304
    """
    return -(-vocab_size // multiple) * multiple


def num_valid(targets: Any) -> jax.Array:
    """Number of `targets`, of any shape, that are not below 0, int32."""
    # int32 also where 64-bit integers are enabled: all devices sum the same dtype.
    return jnp.sum(targets >= 0, dtype=jnp.int32)


def check_heads(*, hidden: int, num_heads: int) -> None:
    """Raises ConfigError unless the stream divides into heads."""
    if hidden % num_heads:
        lower = hidden - hidden % num_heads
        nearest = lower or num_heads
        raise ConfigError(
            f"model.hidden={hidden} does not divide into model.num_heads={num_heads} heads",
            rule="hidden-per-head: hidden is a multiple of num_heads",
            picture=f"{hidden} = {num_heads} x {hidden // num_heads} + {hidden % num_heads}",
            repair=f"set model.hidden={nearest} (the nearest below) or {lower + num_heads}",
        )


def check_activation(activation: str) -> None:
    """Raises ConfigError for an unknown activation."""
    _check_known("activation", activation, tuple(ACTIVATIONS))


def check_choices(*, attention: str, recompute: str) -> None:
    """Raises ConfigError for an unknown choice, or one that has no effect beside another."""
    _check_known("attention", attention, tuple(ATTENTION))
    _check_known("recompute", recompute, RECOMPUTE)
    if recompute == "attention" and attention != "xla":
        raise ConfigError(
            f"model.recompute='attention' with model.attention={attention!r}",
            rule="recompute-attention: it leaves out the scores and probabilities, which only 'xla' keeps",
            repair=f"set model.recompute='none'; {attention!r} keeps as little",
        )


def _check_known(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f"model.{name}={value!r} is not known.{closest(value, list(known))}",
            rule=f"model-{name}: one of {', '.join(known)}",
            repair=f"set model.{name}={known[0]!r}",
        )
