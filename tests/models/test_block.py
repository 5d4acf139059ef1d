"""One layer of each family, and its halves, against the textbook's: values and all gradients."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import textbook
from flax import nnx
from small_models import (
    HIDDEN,
    assert_near,
    config_of,
    first_layer,
    in_tiers,
    masked_tokens,
    normal,
    random_params,
    stream,
)

from jaxpipe.mesh import TensorAxis
from jaxpipe.models import Anatomy, LanguageModel
from jaxpipe.models.block import FeedForward
from jaxpipe.models.choices import gelu_tanh
from jaxpipe.models.linear import LayerNorm, RMSNorm
from jaxpipe.models.llama import swiglu

PADDING_MASK = masked_tokens()["padding_mask"]
LAYERS = {
    "gpt": textbook.gpt_layer,
    "bert": partial(textbook.bert_layer, padding_mask=PADDING_MASK),
    "llama": textbook.llama_layer,
}
MICROBATCHES = {"gpt": {}, "bert": {"padding_mask": PADDING_MASK}, "llama": {}}
# The forms that compute the same in other ways.
FORMS = [
    {},
    {"recompute": "attention"},
    {"recompute": "full"},
    {"attention": "chunked"},
    {"attention": "chunked", "recompute": "full"},
]


def _name(form: dict) -> str:
    return " ".join(form.values()) or "xla none"


def _value_and_gradients(function, params, x):
    def objective(params, x):
        y = function(params, x)
        return (y * stream(seed=3)).sum(), y

    (_, y), gradients = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(params, x)
    return y, gradients


# BERT's is GPT's but for what is seen, which both forms of attention have to know in forward and backward.
@pytest.mark.parametrize(
    ("family", "form"),
    in_tiers(
        ((family, form) for family in LAYERS for form in (FORMS[1::2] if family == "bert" else FORMS)),
        default=[("gpt", FORMS[0]), ("llama", FORMS[0])],
    ),
    ids=lambda value: value if isinstance(value, str) else _name(value),
)
def test_a_layer_and_its_gradients_are_those_of_the_textbook(family, form):
    config = config_of(family, **form)
    params = first_layer(random_params(config))
    ours = _value_and_gradients(partial(_layer, family, config), params, stream())
    assert_near(ours, _of_the_textbook(family))


def _layer(family: str, config, params, x):
    return LanguageModel(config).layer(params, x, MICROBATCHES[family], None)


@cache
def _of_the_textbook(family: str):
    """It knows nothing of forms."""
    config = config_of(family)
    return _value_and_gradients(partial(LAYERS[family], config), first_layer(random_params(config)), stream())


@pytest.mark.parametrize("num_kv_heads", in_tiers([1, 4], default=[1]))
def test_any_number_of_key_value_heads_is_that_of_the_textbook(num_kv_heads):
    config = config_of("llama", num_kv_heads=num_kv_heads)
    params = first_layer(random_params(config))
    ours = _value_and_gradients(partial(_layer, "llama", config), params, stream())
    assert_near(ours, _value_and_gradients(partial(textbook.llama_layer, config), params, stream()))


HALVES = {
    "gelu": (LayerNorm, ("up",), gelu_tanh, True, textbook.layer_norm, textbook.feed_forward),
    "swiglu": (RMSNorm, ("gate", "up"), swiglu, False, textbook.rms_norm, textbook.swiglu_feed_forward),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_feed_forward_and_its_gradients_are_those_of_the_textbook(name):
    norm, names, activation, bias, formula_of_norm, formula = HALVES[name]
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_size": HIDDEN}
    module = FeedForward(
        norm(HIDDEN),
        Anatomy(hidden=HIDDEN, width=40, num_up=len(names), vocab_size=1, num_rows=1, **heads),
        names=names,
        activation=activation,
        bias=bias,
        output_deviation=1.0,
        tensor=TensorAxis(),
        rngs=nnx.Rngs(0),
    )
    graph, state = nnx.split(module)
    params = jax.tree.map(lambda leaf: 0.5 + 0.3 * normal(*leaf.shape), nnx.to_pure_dict(state))
    assert set(params) == {"norm", "down", *names}
    ours = _value_and_gradients(lambda params, x: nnx.merge(graph, params)(x), params, stream())
    assert_near(
        ours,
        _value_and_gradients(lambda params, x: formula(params, formula_of_norm(x, params["norm"])), params, stream()),
    )


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_later_tokens_change_nothing_before_them(family):
    config = config_of(family)
    params, x = first_layer(random_params(config)), jnp.asarray(stream())
    apply = jax.jit(lambda x: LanguageModel(config).layer(params, x, {}, None))
    before, changed = apply(x), apply(x.at[:, 5:].add(normal(HIDDEN)))
    np.testing.assert_array_equal(changed[:, :5], before[:, :5])
    assert (np.abs(changed - before)[:, 5:].max(axis=-1) > 0.1).all()


@pytest.mark.parametrize("family", in_tiers(LAYERS, default=[]))
def test_low_precision_is_near(family):
    config = config_of(family)
    params, x = first_layer(random_params(config), "bfloat16"), jnp.asarray(stream(), jnp.bfloat16)
    y = jax.jit(partial(_layer, family, config))(params, x)
    assert y.dtype == jnp.bfloat16
    exact = LAYERS[family](config, *jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, x)))
    # A handful of roundings to 8 bits, one after the other.
    assert_near(y.astype(jnp.float32), exact, tolerance=8 * 2**-9)
