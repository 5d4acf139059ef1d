"""Model FLOPs against the published utilizations of Megatron-LM, and against the products of the gradient's jaxpr."""

import math
from typing import Any

import jax
import pytest
from jax.extend.core import jaxprs_in_params
from small_models import CONFIGS, SEQ, batch_of, config_of, random_params, total

from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.models.flops import model_flops

NUM_PREDICTED = {"gpt": None, "llama": None, "bert": batch_of("bert")["predicted"].shape[1]}


# Korthikanti et al., MLSys 2023, tables 3 and 5: sequences of 2048, 51200 words, A100s of 312 TFLOP/s.
@pytest.mark.parametrize(
    ("num_layers", "hidden", "num_heads", "batch_size", "num_gpus", "step_time_s", "utilization"),
    [
        (48, 6144, 64, 4, 8, 1.10, 0.415),
        (96, 12288, 96, 64, 64, 13.75, 0.514),
        (105, 20480, 128, 280, 280, 37.83, 0.560),
        (128, 25600, 160, 512, 512, 71.49, 0.563),
    ],
    ids=["22B", "175B", "530B", "1T"],
)
def test_published_utilizations(num_layers, hidden, num_heads, batch_size, num_gpus, step_time_s, utilization):
    config = GPTConfig(num_layers=num_layers, hidden=hidden, num_heads=num_heads, vocab_size=51200, num_positions=2048)
    flops = batch_size * model_flops(config, seq_len=2048)
    # The times are printed with two digits behind the point: 1.10 s is known to half a percent.
    assert flops / (num_gpus * 312e12 * step_time_s) == pytest.approx(utilization, rel=0.006)


def product_flops(jaxpr: Any) -> int:
    """Two for every multiplication of the matrix products, those of loops as often as they run."""
    flops = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), left = equation.params["dimension_numbers"], equation.invars[0].aval.shape
            flops += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
        inner = sum(product_flops(part) for part in jaxprs_in_params(equation.params))
        flops += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return flops


def flops_of_a_gradient(family: str, config: Any) -> int:
    batch, model = batch_of(family), LanguageModel(config)
    gradient = jax.make_jaxpr(jax.grad(lambda params: total(model.loss_sum(params, batch))))
    return product_flops(gradient(random_params(config)).jaxpr)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_plain_gradient_has_these_products(family):
    config = CONFIGS[family]
    num_sequences = batch_of(family)["tokens"].shape[0]
    expected = num_sequences * model_flops(config, seq_len=SEQ, num_predicted=NUM_PREDICTED[family])
    assert flops_of_a_gradient(family, config) == expected


def test_a_bert_without_the_order_has_two_products_less():
    config = config_of("bert", sentence_order=False)
    expected = batch_of("bert")["tokens"].shape[0] * model_flops(config, seq_len=SEQ, num_predicted=4)
    assert flops_of_a_gradient("bert", config) == expected


def test_rows_that_are_no_words_are_computed_and_not_counted():
    config = config_of("gpt", vocab_multiple=100)
    num_sequences, num_rows_more = batch_of("gpt")["tokens"].shape[0], 100 - config.vocab_size
    counted = num_sequences * model_flops(config, seq_len=SEQ)
    # Forward, and backward to the stream and to the table.
    assert flops_of_a_gradient("gpt", config) == counted + 3 * 2 * num_sequences * SEQ * config.hidden * num_rows_more


def test_what_is_computed_again_is_not_counted():
    config = config_of("llama", recompute="full")
    assert model_flops(config, seq_len=SEQ) == model_flops(CONFIGS["llama"], seq_len=SEQ)
    num_sequences = batch_of("llama")["tokens"].shape[0]
    assert flops_of_a_gradient("llama", config) > 1.1 * num_sequences * model_flops(config, seq_len=SEQ)


def test_a_window_bounds_the_keys_of_a_query():
    plain, windowed = CONFIGS["llama"], config_of("llama", sliding_window=4)
    heads = plain.num_layers * SEQ * plain.num_heads * plain.anatomy.head_size
    saved = model_flops(plain, seq_len=SEQ) - model_flops(windowed, seq_len=SEQ)
    assert saved == 3 * 2 * 2 * (SEQ - 4) * heads
    assert model_flops(config_of("llama", sliding_window=99), seq_len=SEQ) == model_flops(plain, seq_len=SEQ)
