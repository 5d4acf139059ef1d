"""Generation of text, token by token, by a causal model: each token runs the whole model, simple and not fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.models.language_model import LanguageModel, Params


def generate(
    model: LanguageModel,
    params: Params,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    window: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yields the tokens that follow `prompt`.

    Args:
        model: a causal one, on one device.
        params: canonical.
        prompt: tokens, at least one.
        num_tokens: how many follow.
        window: the model sees so many of the last tokens, at most; no more than it has positions.
        temperature: logits are divided by it, >= 0; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens are drawn from; None: all of them.
        seed: decides what is drawn; the same on every platform that computes the same logits.
    """
    text, key = list(prompt), jax.random.key(seed)
    # Tokens stand at the beginning of a row of one size, so that one program serves them all: a causal model's
    # logits do not depend on what comes after.
    size = min(window, len(text) + num_tokens)
    draw = jax.jit(partial(_draw, model, temperature=temperature, top_k=top_k))
    for i in range(num_tokens):
        seen = text[-size:]
        row = np.zeros(size, np.int32)
        row[: len(seen)] = seen
        text.append(int(draw(params, row, len(seen) - 1, jax.random.fold_in(key, i))))
        yield text[-1]


def _draw(
    model: LanguageModel,
    params: Params,
    row: jax.Array,
    last: jax.Array,
    key: jax.Array,
    *,
    temperature: float,
    top_k: int | None,
) -> jax.Array:
    """Token after position `last` of `row` "seq"."""
    logits = model.logits(params, {"tokens": row[None]})[0, last]
    if temperature == 0:
        return logits.argmax()
    if top_k is not None:
        least = jax.lax.top_k(logits, min(top_k, logits.size))[0][-1]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.random.categorical(key, logits / temperature)
