"""Tokens are drawn from the logits of what came before them, as far as the model sees."""

from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import in_tiers

from jaxpipe.data import Tokenizer, load_tokenizer
from jaxpipe.data.tokenizer import with_beginning
from jaxpipe.models import DeepseekConfig, GPTConfig, GptOssConfig, LanguageModel, LlamaConfig
from jaxpipe.models.rotary import RotaryScaling
from jaxpipe.sample import Continuation, generate

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
    return [int(token) for (token,) in generate(MODEL, params, PROMPT, num_tokens=NUM_TOKENS, window=WINDOW, **options)]


@pytest.mark.ci
def test_without_temperature_the_likeliest_token_follows_beyond_the_window_too(params):
    text = list(PROMPT)
    for token in say(params, temperature=0.0):
        assert token == last_logits(params, text).argmax()
        text.append(token)
    assert len(text) == len(PROMPT) + NUM_TOKENS > WINDOW
    assert len(set(text[len(PROMPT) :])) > 2


@pytest.mark.slow
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


@pytest.mark.ci
def test_the_seed_decides_and_draws_anew_for_every_token(params):
    drawn = [say(params, temperature=50.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 3  # all tokens are about as likely


LLAMA = {"num_layers": 3, "hidden": 16, "num_heads": 4, "num_kv_heads": 2, "feed_forward": 24, "vocab_size": 11}
YARN = RotaryScaling("yarn", 4.0, original_max_position=4)
CONFIGS = {
    "gpt": GPTConfig(num_layers=2, hidden=16, num_heads=2, vocab_size=11, num_positions=12),
    "llama": LlamaConfig(**LLAMA, sliding_window=4, attention="chunked"),
    "gpt_oss": GptOssConfig(**LLAMA, sliding_window=4, full_every=2, num_experts=3, rope_scaling=YARN),
    "deepseek_v3": DeepseekConfig(
        **LLAMA | {"num_kv_heads": 4},
        plain_size=5,
        rotary_size=4,
        value_size=3,
        latent_size=6,
        query_latent_size=7,
        dense_width=20,
        bias_rate=0.1,
        num_dense=2,
        rope_scaling=YARN,
        score_mscale=1.0,
    ),
    "qwen3": LlamaConfig(**LLAMA, head_size=6, query_key_norm=True, tie_embeddings=True, recompute="full"),
}


@pytest.mark.parametrize("name", in_tiers(CONFIGS, default=["qwen3"]))
def test_logits_with_kept_keys_and_values_are_those_of_the_whole_text(name):
    """A prompt of five in a row of nine, then one token after the other, to the end of the cache."""
    model = LanguageModel(CONFIGS[name])
    params = model.init(jax.random.key(0))
    tokens = np.random.default_rng(0).integers(11, size=(3, 12), dtype=np.int32)
    whole = np.asarray(jax.jit(model.logits)(params, {"tokens": tokens}))
    cache = model.new_cache(params, batch=3, size=12)
    follow = jax.jit(model.following_logits)
    found, cache = follow(params, tokens[:, :9], cache, 5)
    np.testing.assert_allclose(found, whole[:, 4], atol=1e-5)
    for place in range(5, 12):
        found, cache = follow(params, tokens[:, place : place + 1], cache, 1)
        np.testing.assert_allclose(found, whole[:, place], atol=1e-5)


@pytest.mark.ci
def test_each_sample_is_the_only_one_of_its_own_seed(params):
    """After the last seed comes the first again."""
    last = 2**32 - 1
    several = generate(
        MODEL, params, PROMPT, num_tokens=NUM_TOKENS, window=WINDOW, temperature=9.0, seed=last - 1, num_samples=3
    )
    for seed, text in zip((last - 1, last, 0), np.stack(list(several), axis=1), strict=True):
        assert text.tolist() == say(params, temperature=9.0, seed=seed)


def test_a_model_without_kept_keys_and_values_says_the_same(params, monkeypatch):
    kept = say(params, temperature=0.0)
    monkeypatch.setattr(LanguageModel, "new_cache", lambda *_, **__: None)
    assert say(params, temperature=0.0) == kept


@pytest.mark.parametrize(
    ("stops", "shown", "num_added"),
    [((), "the cat sat.", 9), (("at",), "the c", 4), (("sat", "ca"), "the ", 3), (("the",), "the cat sat.", 9)],
)
def test_a_continuation_ends_before_a_stop_string_and_with_the_document(stops, shown, num_added):
    """Of the prompt nothing counts; what follows the end is not added."""
    bytes_of = load_tokenizer("byte", is_masked=False)
    text, added = Continuation([*b"the"], bytes_of, stops), 0
    for token in b" cat sat.\0 more":
        added += not text.is_done
        text.add(token)
    assert text.shown() == shown
    assert added == num_added + (not stops or stops == ("the",))


def test_a_continuation_ends_at_the_first_of_several_tokens():
    bytes_of = load_tokenizer("byte", is_masked=False)
    for end in b"\x01\x02":
        text = Continuation([*b"the"], bytes_of, (), ends=(1, 2))
        for token in [*b" cat\0", end, *b"more"]:
            text.add(token)
        assert text.shown() == "the cat\0"


@pytest.mark.parametrize(
    ("beginning", "prompt", "given"),
    [
        ((7,), [1, 2], [7, 1, 2]),
        ((7,), [7, 1], [7, 1]),
        ((7, 8), [7, 1], [7, 8, 7, 1]),
        ((), [1], [1]),
        ((7,), [], [7]),
    ],
)
def test_a_prompt_has_one_beginning(beginning, prompt, given):
    assert with_beginning(prompt, cast(Tokenizer, SimpleNamespace(beginning=beginning))) == given
