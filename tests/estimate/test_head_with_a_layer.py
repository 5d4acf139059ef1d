"""A head that predicts a further token in estimates: its products, times, bytes, and what planners may split."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config, check
from jaxpipe.estimate import memory, setting_of
from jaxpipe.estimate.kinds import kinds_in, layer_of_head_in
from jaxpipe.estimate.plan.space import legal_variants
from jaxpipe.estimate.products import flops, matmuls_of
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.split_head import can_split_vocabulary
from jaxpipe.estimate.step import estimate
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.estimate.work import head_matmuls
from jaxpipe.models import LanguageModel, model_flops

TOPOLOGY = parse_topology("a100-80g:1x2")
SIZES = {"hidden": 1024, "num_heads": 8, "vocab_size": 32000, "num_experts": 16, "experts_per_token": 4}
SIZES |= {"feed_forward": 512, "dense_width": 2048, "num_dense": 1, "num_layers": 4}
SIZES |= {"plain_size": 128, "rotary_size": 64, "value_size": 128, "latent_size": 256, "query_latent_size": "384"}


def config_of(**changes):
    config = base_config("deepseek_v3")
    config.model.update(SIZES | {"dtype": "bfloat16", "attention": "chunked", "mtp_factor": 0.3})
    config.data.seq_len, config.data.batch_size = 2048, 8
    config.pipeline.num_microbatches, config.mesh.pipe = 4, 2
    config.update_from_flattened_dict(changes)
    check(config)
    return config


def settings(**changes):
    """With the module and without it."""
    return tuple(setting_of(config_of(**{"model.mtp_factor": of}, **changes), TOPOLOGY) for of in (0.3, 0.0))


def test_products_are_those_that_the_traced_head_has():
    """With a capacity every product of experts is one of matrices; the layer's are those of any layer."""
    changes = {"model.dispatch": "capacity", "model.attention": "xla", "model.dtype": "float32"}
    setting, _ = settings(**changes)
    model = LanguageModel(setting.model)
    shared = jax.eval_shape(lambda: model.init(jax.random.key(0)))["shared"]
    shape = setting.microbatch_size, setting.seq_len
    x = jax.ShapeDtypeStruct((*shape, SIZES["hidden"]), np.float32)
    batch = dict.fromkeys(("tokens", "targets"), jax.ShapeDtypeStruct(shape, np.int32))
    losses = jax.eval_shape(model.head, shared, x, batch)
    traced = jax.make_jaxpr(model.head_backward)(shared, x, batch, losses, shared)
    layer = traced_layer(layer_of_head_in(setting))
    counted = flops(head_matmuls(setting)) + flops(layer.forward + layer.backward)
    assert flops(list(matmuls_of(traced.jaxpr.eqns))) == counted


def test_model_flops_have_a_layer_a_projection_and_logits_more():
    setting, plain = settings()
    seq, hidden = setting.seq_len, SIZES["hidden"]
    of_one = replace(kinds_in(plain)[0][0].model, num_layers=1)
    of_two = replace(of_one, num_layers=2)
    layer, two = (model_flops(model, seq_len=seq) for model in (of_one, of_two))
    more = (two - layer) + 3 * 2 * seq * (2 * hidden**2 + hidden * SIZES["vocab_size"])
    assert model_flops(setting.model, seq_len=seq) == model_flops(plain.model, seq_len=seq) + more


def test_the_step_has_the_time_of_the_layer_and_of_the_second_logits():
    setting, plain = settings()
    source = Roofline.of(TOPOLOGY.hardware)
    layer = source.times(kinds_in(plain)[0][0])
    head, plain_head = source.times(setting).head_s, source.times(plain).head_s
    layer_s = layer.layer_forward_s + layer.layer_backward_s
    assert plain_head + layer_s < head - plain_head < 1.1 * (plain_head + layer_s)
    assert estimate(setting, source).step_s > estimate(plain, source).step_s + 4 * layer_s


def test_a_head_with_a_layer_is_split_over_no_pipe_and_runs_with_a_flush():
    setting, plain = settings()
    assert can_split_vocabulary(plain)
    assert not can_split_vocabulary(setting)
    names = {variant.name for variant in legal_variants(replace(setting, model=replace(setting.model, num_dense=0)))}
    assert "1f1b" in names
    assert "pipedream_2bw" not in names


# `python -m jaxpipe.compile --topology=a100-80g:1x2` with `config_of()`, jax 0.10.2.
COMPILED_BYTES = 3_562_021_460


def test_bytes_are_within_five_percent_of_the_compiled_step():
    setting, plain = settings()
    assert memory(setting).total == pytest.approx(COMPILED_BYTES, rel=0.05)
    assert memory(plain).total < 0.95 * COMPILED_BYTES
