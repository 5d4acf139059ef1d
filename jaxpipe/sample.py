"""Prints the continuation of a prompt by a trained causal model; simple and not fast.

    python -m jaxpipe.sample --workdir=DIR --prompt=TEXT [--num_tokens=200] [--temperature=0.8] [--top_k=40] [--seed=0]

Runs on one device without a pipeline, and ends early if the model ends the document.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from absl.flags import FlagValues

from jaxpipe.checkpoints import restore_canonical
from jaxpipe.command_line import define_number
from jaxpipe.config import model_config
from jaxpipe.config.command_line import run
from jaxpipe.config.data import tokenizer_of
from jaxpipe.config.model import family_of
from jaxpipe.errors import ConfigError, explain
from jaxpipe.models import FAMILIES
from jaxpipe.models.language_model import LanguageModel, Params
from jaxpipe.training import run_folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    return run(
        execute,
        define_flags=define_flags,
        usage=__doc__,
        arguments=arguments,
        required={"workdir": "runs/quickstart", "prompt": "'def '"},
    )


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --workdir, --prompt and the flags of sampling."""
    del arguments
    flags.DEFINE_string("workdir", None, "Folder of a run, or of a converted model.", values)
    flags.DEFINE_string("prompt", None, "The text that is continued.", values)
    flags.DEFINE_integer("num_tokens", 200, "Tokens that follow it, at most.", lower_bound=1, flag_values=values)
    help_text = "Logits are divided by it; 0 takes the likeliest token."
    define_number(values, "temperature", 0.8, help_text, what="temperature", is_positive=False)
    flags.DEFINE_integer(
        "top_k", None, "Only so many of the likeliest tokens are drawn from.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("seed", 0, "Decides what is drawn.", lower_bound=0, flag_values=values)


def execute(values: FlagValues) -> None:
    """Prints one continuation."""
    config = run_folder.read_config(values.workdir)
    if family_of(config).masked:
        causal = " or ".join(name for name, family in FAMILIES.items() if not family.masked)
        raise ConfigError(
            explain(
                f"--workdir={values.workdir} holds a model of family {config.model.family!r}",
                rule="sample-causal: only a model that predicts the next token can continue a text",
                repair=f"name the folder of a run of {causal}",
            )
        )
    model, tokenizer = LanguageModel(model_config(config)), tokenizer_of(config)
    step, params = restore_canonical(run_folder.path_of(values.workdir), model=model)
    params = jax.tree.map(lambda leaf: leaf.astype(config.model.dtype), params)

    text = [int(token) for token in tokenizer.encode(values.prompt)]
    for token in generate(
        model,
        params,
        [*tokenizer.beginning, *text],
        num_tokens=values.num_tokens,
        window=config.data.seq_len,
        temperature=values.temperature,
        top_k=values.top_k,
        seed=values.seed,
    ):
        if token == tokenizer.separator:
            break
        text.append(token)
    print(f"parameters of step {step}")
    print(tokenizer.decode(text))


# Generation: each token runs the whole model, which is simple and not fast


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
        num_tokens: number of tokens that follow.
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


if __name__ == "__main__":
    sys.exit(main())
