"""Prints continuations of a prompt by a trained causal model.

    python -m jaxpipe.sample --workdir=DIR --prompt=TEXT [--num_tokens=200] [--temperature=0.8] [--top_k=K] [--seed=0]
        [--average]

Runs on one device without a pipeline, with the keys and values of earlier tokens kept. A continuation ends early where
the model ends the text, as the tokenizer's files say (eos_token, generation_config.json, the end of an answer in the
chat template), or where a string of --stop would begin; --num_samples draws several at a time. Names of special tokens
in --prompt are these tokens, or text with --nomarkup; with --chat it is a question, written by the chat template.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from absl.flags import FlagValues

from jaxpipe.checkpoints import restore_canonical
from jaxpipe.command_line import define_number, main_of
from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.checks import check_model
from jaxpipe.config.command_line import define_allow_code, define_average, run
from jaxpipe.config.data import tokenizer_of
from jaxpipe.config.model import family_of
from jaxpipe.data import Tokenizer
from jaxpipe.data.prepare.endings import ends_of_text
from jaxpipe.data.prepare.templates import ChatTemplate, RefusedError, read_templates
from jaxpipe.data.special_tokens import DEFAULT
from jaxpipe.data.tokenizer import with_beginning
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import key_of
from jaxpipe.models import FAMILIES
from jaxpipe.models.attention import Cache
from jaxpipe.models.language_model import LanguageModel, Params
from jaxpipe.training import run_folder

NUM_SEEDS = 2**32
LEAST_TEMPERATURE = 1e-30  # by which logits can be divided in float32


def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --workdir, --prompt and the flags of sampling."""
    del arguments
    flags.DEFINE_string("workdir", None, "Folder of a run, or of a converted model.", values)
    define_allow_code(values)
    define_average(values)
    flags.DEFINE_string("prompt", None, "The text that is continued.", values)
    flags.DEFINE_boolean("chat", False, "The prompt is a question to the assistant: its answer follows.", values)
    flags.DEFINE_boolean(
        "markup", True, "Names of special tokens in the prompt, as <|im_end|>, are the tokens; else text.", values
    )
    flags.DEFINE_integer("num_tokens", 200, "Tokens that follow it, at most.", lower_bound=1, flag_values=values)
    help_text = "Logits are divided by it; 0 takes the likeliest token."
    define_number(values, "temperature", 0.8, help_text, what="temperature", is_positive=False)
    flags.DEFINE_integer(
        "top_k", None, "Only so many of the likeliest tokens are drawn from.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer(
        "seed", 0, "Decides what is drawn.", lower_bound=0, upper_bound=NUM_SEEDS - 1, flag_values=values
    )
    flags.DEFINE_integer(
        "num_samples", 1, "Continuations, of this seed and the next ones.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_multi_string("stop", [], "A text that ends a continuation; may be given several times.", values)


def execute(values: FlagValues) -> None:
    """Prints one continuation."""
    config = RunConfig.of(run_folder.read_config(values.workdir, allow_code=values.allow_code))
    check_model(config, name=f"{values.workdir}/{run_folder.CONFIG}")
    _check_texts(prompt=[values.prompt], stop=values.stop)
    # Every text contains the empty one, so nothing would be printed.
    if "" in values.stop:
        raise ConfigError(
            "--stop= is an empty text",
            rule="sample-stop: a stop string has characters, since every text contains the empty one",
            repair="leave --stop out, or give a text",
        )
    if values.chat and not values.markup:
        raise ConfigError(
            "--nomarkup with --chat",
            rule="sample-markup: a question is text that the chat template writes with names of special tokens",
            repair="leave out one of them",
        )
    if family_of(config).masked:
        causal = " or ".join(name for name, family in FAMILIES.items() if not family.masked)
        raise ConfigError(
            f"--workdir={values.workdir} holds a model of family {config.model.family!r}",
            rule="sample-causal: only a model that predicts the next token can continue a text",
            repair=f"name the folder of a run of {causal}",
        )
    model = LanguageModel(model_config(config))
    tokenizer = tokenizer_of(config)
    step, params = restore_canonical(run_folder.path_of(values.workdir), model=model, average=values.average)
    # On the device once, not for each token.
    params = jax.device_put(jax.tree.map(lambda leaf: leaf.astype(config.model.dtype), params))

    templates = read_templates(config.data.tokenizer)
    text = _question(values.prompt, config.data.tokenizer, templates) if values.chat else values.prompt
    # One text, of which only the tokens are needed.
    prompt = tokenizer.encode_places([text], values.markup)[0][0].tolist()
    ends = ends_of_text(tokenizer, templates)
    texts = [Continuation(prompt, tokenizer, values.stop, ends) for _ in range(values.num_samples)]
    for tokens in generate(
        model,
        params,
        # A template writes the beginning itself.
        prompt if values.chat else with_beginning(prompt, tokenizer, reads_special=values.markup),
        num_tokens=values.num_tokens,
        window=config.data.seq_len,
        temperature=values.temperature,
        top_k=values.top_k,
        seed=values.seed,
        num_samples=values.num_samples,
    ):
        for text, token in zip(texts, tokens, strict=True):
            text.add(int(token))
        # Samples that are done are computed on, as all stand in one array; so the last of them ends the loop.
        if all(text.is_done for text in texts):
            break
    print(f"{'average of the weights at' if values.average else 'parameters of'} step {step}")
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"--- {number}")
        print(text.shown())


def _check_texts(**flags: Sequence[str]) -> None:
    """Raises ConfigError for bytes that are not UTF-8, which Python keeps in an argument as halves of characters."""
    for flag, texts in flags.items():
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ConfigError(
                    f"--{flag} is no text: {error.reason}",
                    rule="sample-text: --prompt and --stop are texts in UTF-8",
                    picture=ascii(text),
                    repair=f"write --{flag} in UTF-8, as a terminal does whose locale is UTF-8",
                ) from error


def _question(text: str, name: str, templates: Mapping[str, ChatTemplate]) -> str:
    """The text of a conversation that asks the assistant `text`, by the default template of the tokenizer `name`."""
    why = "which has no chat template"
    if DEFAULT in templates:
        try:
            return templates[DEFAULT].render([{"role": "user", "content": text}], {}, is_asked=True)[0]
        except RefusedError as error:
            why = f"whose chat template refuses a question alone: {error}"
    raise ConfigError(
        f"--chat with data.tokenizer={name!r}, {why}",
        rule="chat-template: messages become text by the template of the tokenizer",
        repair="leave --chat out, and write the prompt as the model was trained to read it",
    )


class Continuation:
    """A prompt and what follows it, up to a token of `ends` or the first of the stop strings."""

    def __init__(
        self, prompt: Sequence[int], tokenizer: Tokenizer, stops: Sequence[str], ends: Sequence[int] | None = None
    ):
        self._ends = tokenizer.ends if ends is None else ends
        self._tokens = list(prompt)
        self._num_prompt = len(prompt)
        self._tokenizer = tokenizer
        self._stops = stops
        self.is_done = False

    def add(self, token: int) -> None:
        """Adds a token, unless the text is done."""
        if self.is_done or token in self._ends:
            self.is_done = True
            return
        self._tokens.append(token)
        # Looked for in the text and not among tokens: a stop string may end within a token or span several.
        self.is_done = any(stop in self._following() for stop in self._stops)

    def shown(self) -> str:
        """The text without what the stop strings end."""
        following = self._following()
        # The first of them, since a token may complete several at once.
        end = min((following.find(stop) for stop in self._stops if stop in following), default=None)
        if end is None:
            return self._tokenizer.decode(self._tokens)
        # Decoded together, since decoders may drop the space before a text's first word.
        whole = self._tokenizer.decode(self._tokens)
        return whole[: len(whole) - len(following) + end]

    def _following(self) -> str:
        return self._tokenizer.decode(self._tokens[self._num_prompt :])


# ---- Generation


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
    num_samples: int = 1,
) -> Iterator[np.ndarray]:
    """Yields the tokens that follow `prompt`, one of each sample at a time: "sample", int32.

    As long as the text fits into the window, a token is computed from the keys and values of those before it. Beyond
    the window, where every token stands at another position than before, the whole window is computed again.

    Args:
        model: a causal one, on one device.
        params: canonical.
        prompt: tokens, at least one.
        window: the model sees so many of the last tokens, at most; no more than it has positions.
        temperature: logits are divided by it, >= 0; 0 takes the likeliest token.
        top_k: only so many of the likeliest tokens are drawn from; None: all of them.
        seed: decides what is drawn; the same on every platform that computes the same logits. Sample i is the only one
            of seed + i, modulo 2^32.
    """
    # The seeds wrap around where a uint32 does; equal seeds draw equal texts.
    keys = jax.vmap(key_of)(((seed + np.arange(num_samples)) % NUM_SEEDS).astype(np.uint32))
    # Tokens stand at the beginning of a row of one size, so that one program serves them all: a causal model's
    # logits do not depend on what comes after.
    size = min(window, len(prompt) + num_tokens)
    text = np.tile(np.array(prompt, np.int32), (num_samples, 1))
    draw = partial(_draw, temperature=temperature, top_k=top_k)

    # Donated, so that the cache is written in place and does not stand in memory twice.
    @partial(jax.jit, donate_argnums=1)
    def follow(params: Params, cache: Cache, tokens: jax.Array, num_new: Any, index: Any) -> tuple[jax.Array, Cache]:
        logits, cache = model.following_logits(params, tokens, cache, num_new)
        return draw(logits, keys, index), cache

    # `last` is traced, so that one program serves every length.
    @jax.jit
    def draw_anew(params: Params, rows: jax.Array, last: Any, index: Any) -> jax.Array:
        return draw(model.logits(params, {"tokens": rows})[:, last], keys, index)

    def row(seen: np.ndarray) -> np.ndarray:
        return np.pad(seen, ((0, 0), (0, size - seen.shape[1])))

    cache = model.new_cache(params, batch=num_samples, size=size)
    for index in range(num_tokens):
        seen = text[:, -size:]
        if cache is None or text.shape[1] > size:
            # - 1: the logits of the last token say what follows.
            drawn = draw_anew(params, row(seen), seen.shape[1] - 1, index)
        elif index == 0:
            drawn, cache = follow(params, cache, row(seen), seen.shape[1], index)
        else:
            drawn, cache = follow(params, cache, seen[:, -1:], 1, index)
        text = np.concatenate([text, np.asarray(drawn, np.int32)[:, None]], axis=1)
        yield text[:, -1]


def _draw(logits: jax.Array, keys: jax.Array, index: Any, *, temperature: float, top_k: int | None) -> jax.Array:
    """A token of each row of `logits` "sample vocab", the `index`-th of its key."""
    if temperature == 0:
        return logits.argmax(axis=-1)
    # A top_k above the vocabulary leaves all tokens.
    if top_k is not None:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        # Tokens that are as likely as the last of them stay too.
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    return jax.vmap(
        # The key of a token's place and not of the draw before it: a text does not depend on where it is cut.
        lambda key, row: jax.random.categorical(
            # A temperature of 1e-40 is 0 in float32, and 0 / 0 no logit.
            jax.random.fold_in(key, index),
            row / max(temperature, LEAST_TEMPERATURE),
        )
    )(keys, logits)


main = main_of(
    run, execute, define_flags=define_flags, usage=__doc__, required={"workdir": "runs/quickstart", "prompt": "'def '"}
)

if __name__ == "__main__":
    sys.exit(main())
