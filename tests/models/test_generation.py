"""Tokens are drawn from the logits of what came before them, as far as the model sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.sample import generate

WINDOW, NUM_TOKENS, PROMPT = 6, 9, [3, 1, 4]
MODEL = LanguageModel(GPTConfig(num_layers=2, hidden=16, num_heads=2, vocab_size=11, num_positions=WINDOW))


@pytest.fixture(scope="module")
def params():
    """Large ones, so that tokens differ in how likely they are."""
    generator = np.random.default_rng(0)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: generator.normal(0, 0.7, leaf.shape).astype(np.float32), shapes)


logits = jax.jit(MODEL.logits)


def last_logits(params, text):
    return np.asarray(logits(params, {"tokens": jnp.array([text[-WINDOW:]])})[0, -1])


def say(params, **options):
    return list(generate(MODEL, params, PROMPT, num_tokens=NUM_TOKENS, window=WINDOW, **options))


@pytest.mark.ci
def test_without_temperature_the_likeliest_token_follows_beyond_the_window_too(params):
    text = list(PROMPT)
    for token in say(params, temperature=0.0):
        assert token == last_logits(params, text).argmax()
        text.append(token)
    assert len(text) == len(PROMPT) + NUM_TOKENS > WINDOW
    assert len(set(text[len(PROMPT) :])) > 2


@pytest.mark.ci
def test_one_of_the_likeliest_tokens_is_drawn(params):
    chosen = set()
    for seed in range(4):
        text = list(PROMPT)
        for token in say(params, top_k=2, temperature=5.0, seed=seed):
            likeliest = np.argsort(last_logits(params, text))[-2:]
            assert token in likeliest
            chosen.add(int(np.flatnonzero(likeliest == token)[0]))
            text.append(token)
    assert chosen == {0, 1}


def test_the_seed_decides_and_draws_anew_for_every_token(params):
    drawn = [say(params, temperature=50.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 3  # all tokens are about as likely
