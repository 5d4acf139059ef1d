"""Products of F, B, I and W against the model's FLOPs, and against what experiment 014 counts in the jaxprs."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from settings_of_gpts import SMALL, gpt_setting

from jaxpipe.estimate import Setting
from jaxpipe.estimate.products import Matmul, flops, matmuls_of
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.estimate.work import head_matmuls, split_head_matmuls
from jaxpipe.models import BertConfig, LanguageModel, LlamaConfig
from jaxpipe.models.flops import model_flops
from jaxpipe.training import policy_gradient

LLAMA = {
    "num_layers": 24,
    "hidden": 1024,
    "num_heads": 16,
    "num_kv_heads": 4,
    "feed_forward": 2816,
    "vocab_size": 32000,
}


def setting_of(family: str, **choices: Any) -> Setting:
    setting = gpt_setting(microbatch_size=2)
    if family == "gpt":
        model = replace(setting.model, **choices)
    elif family == "llama":
        model = LlamaConfig(**LLAMA, **choices)
    else:
        model = BertConfig(**SMALL, **choices)
    return replace(setting, model=model, num_predicted=150 if family == "bert" else None)


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_all_parts_together_are_the_models_flops(family):
    setting = setting_of(family)
    layer = traced_layer(setting)
    counted = setting.model.num_layers * flops(layer.forward + layer.backward) + flops(head_matmuls(setting))
    sample = model_flops(setting.model, seq_len=setting.seq_len, num_predicted=setting.num_predicted)
    assert counted == setting.microbatch_size * sample


def test_what_stands_before_the_logits_is_computed_whole_in_s_and_in_t():
    """BERT's transform of 150 tokens, and pooler and order of a sequence; 2 sequences, pipe 4."""
    setting = replace(setting_of("bert"), pipe=4, vocab_over_pipe=True)
    hidden, words = SMALL["hidden"], SMALL["vocab_size"]
    logits, before = 2 * 2 * 150 * words * hidden // 4, 2 * 2 * (150 * hidden**2 + hidden**2 + 2 * hidden)
    of_s, of_t = map(flops, split_head_matmuls(setting))
    assert (of_s, of_t) == (logits + before, 2 * logits + 3 * before)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_loss_of_ones_own_computes_the_logits_twice(is_own):
    """As many FLOPs as the jaxpr of the head has; where `pipe` splits it, S has the logits and T the values."""
    setting = replace(setting_of("llama"), weighs_tokens=is_own)
    own = {"loss": policy_gradient()} if is_own else {}
    model = LanguageModel(setting.model, **own)
    shared = jax.eval_shape(lambda: model.init(jax.random.key(0)))["shared"]
    shape = setting.microbatch_size, setting.seq_len
    x = jax.ShapeDtypeStruct((*shape, LLAMA["hidden"]), np.float32)
    batch = {"targets": jax.ShapeDtypeStruct(shape, np.int32), "advantages": jax.ShapeDtypeStruct(shape, np.float32)}
    head = jax.make_jaxpr(model.head_backward)(shared, x, batch, jax.eval_shape(model.loss.zeros, batch), shared)
    assert flops(list(matmuls_of(head.jaxpr.eqns))) == flops(head_matmuls(setting))
    assert split_head_matmuls(setting) == split_head_matmuls(replace(setting, weighs_tokens=False))


# experiments/014_halves/README.md, "products B = I + W".
@pytest.mark.parametrize(
    ("family", "recompute", "num_i", "num_w"),
    [
        ("gpt", "none", 8, 4),
        ("gpt", "attention", 9, 4),
        ("gpt", "full", 13, 4),
        ("llama", "none", 9, 5),
        ("llama", "attention", 10, 5),
        ("llama", "full", 15, 5),
        ("bert", "none", 8, 4),
        ("bert", "full", 13, 4),
    ],
)
def test_halves_have_as_many_products_as_the_program(family, recompute, num_i, num_w):
    layer = traced_layer(setting_of(family, recompute=recompute))
    assert (len(layer.input_gradient), len(layer.weight_gradient)) == (num_i, num_w)


def test_causal_blocks_spare_almost_half_of_the_scores():
    whole, blocks = (
        [p for p in traced_layer(setting_of("gpt", attention=attention)).forward if 64 in (p.depth, p.columns)]
        for attention in ("xla", "chunked")
    )
    # Eight blocks of 128 queries, the i-th of which sees i blocks of keys: 1 + ... + 8 of 8 x 8.
    assert flops(tuple(blocks)) / flops(tuple(whole)) == 36 / 64


def test_fused_attention_leaves_out_what_no_query_sees():
    scores = traced_layer(setting_of("gpt", attention="cudnn")).forward[1]
    # A query sees itself and those before it: 1 + ... + 1024 keys of 1024 queries.
    assert scores.fused
    assert scores.flops == pytest.approx(2 * 2 * 16 * 64 * sum(range(1, 1025)), rel=1e-3)


def test_tensor_shares_the_work():
    alone, shared = (traced_layer(gpt_setting(tensor=tensor)) for tensor in (1, 4))
    assert flops(alone.forward) == 4 * flops(shared.forward)
    assert flops(alone.backward) == 4 * flops(shared.backward)
    assert flops(head_matmuls(gpt_setting())) == 4 * flops(head_matmuls(gpt_setting(tensor=4)))


def test_gradients_of_a_product_have_as_many_flops():
    forward = Matmul(rows=6, columns=5, depth=7, num=3)
    assert (forward.of_inputs.rows, forward.of_inputs.columns) == (6, 7)
    assert (forward.of_weights.rows, forward.of_weights.columns) == (7, 5)
    assert forward.flops == forward.of_inputs.flops == forward.of_weights.flops == 2 * 3 * 6 * 5 * 7
