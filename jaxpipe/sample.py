"""Prints the continuation of a prompt by a trained causal model; simple and not fast.

    python -m jaxpipe.sample --workdir=DIR --prompt=TEXT [--num_tokens=200] [--temperature=0.8] [--top_k=40] [--seed=0]

Runs on one device without a pipeline, and ends early if the model ends the document.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
from absl import flags
from absl.flags import FlagValues

from jaxpipe.checkpoints import restore_canonical
from jaxpipe.config import model_config
from jaxpipe.config.command_line import run
from jaxpipe.config.data import tokenizer_of
from jaxpipe.config.model import family_of
from jaxpipe.errors import ConfigError, explain
from jaxpipe.models import FAMILIES, LanguageModel
from jaxpipe.models.generation import generate
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
    flags.DEFINE_float(
        "temperature",
        0.8,
        "Logits are divided by it; 0 takes the likeliest token.",
        lower_bound=0.0,
        flag_values=values,
    )
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
    tokenizer = tokenizer_of(config)
    model = LanguageModel(model_config(config))
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


if __name__ == "__main__":
    sys.exit(main())
