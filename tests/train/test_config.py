"""Every config error is found before anything is compiled and says how to mend it."""

import dataclasses
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jaxpipe.config import base_config, check, expected_costs, layers_per_stage, model_config
from jaxpipe.config.base import RunConfig, legal_of
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import resolve
from jaxpipe.models import FAMILIES, BertConfig, DeepseekConfig, GPTConfig, LlamaConfig
from jaxpipe.models.rotary import RotaryScaling

ROOT = Path(__file__).parents[2]


def _with(family="gpt", **values):
    config = base_config(family)
    for path, value in values.items():
        section, field = path.split("__")
        config[section][field] = value
    return config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_config_is_legal_and_has_its_sections_in_order(family):
    config = base_config(family)
    check(config)
    assert list(config.to_dict()) == ["model", "data", "pipeline", "mesh", "optimizer", "train", "checkpoint"]
    assert config.model.family == family


def test_the_example_of_a_family_is_of_that_family():
    for name, family in FAMILIES.items():
        assert runpy.run_path(str(ROOT / family.example))["get_config"]().model.family == name


def test_a_mistyped_field_names_the_closest():
    with pytest.raises(AttributeError, match='Did you mean "hidden"'):
        base_config().model.hiden = 64


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data__batch_size": 33}, ["data.batch_size=33", "batch-divides", "data.batch_size=32, the nearest"]),
        ({"data__batch_size": 49, "mesh__data": 2}, ["x mesh.data=2", "data.batch_size=64, the nearest"]),
        ({"data__batch_size": 5}, ["data.batch_size=16, the nearest"]),
        ({"pipeline__schedule": "1f1"}, ["Did you mean '1f1b'?", "field-choice", "gpipe"]),
        ({"pipeline__costs": "input=1.2"}, ["expected-costs", "wrong: input=1.2", "input_gradient, weight_gradient"]),
        ({"pipeline__costs": "forward=0,backward=2"}, ["expected-costs", "wrong: forward=0\n"]),
        ({"pipeline__costs": "backward=two"}, ["expected-costs", "wrong: backward=two\n"]),
        ({"pipeline__costs": "fast"}, ["expected-costs", "wrong: 'fast'", "pipeline.costs='auto'"]),
        ({"pipeline__options": "num_chunks=2", "mesh__pipe": 4}, ["1f1b", "num_chunks", "no options"]),
        ({"mesh__keep_gathered": "1 GB", "mesh__shard": "weights"}, ["keep-bytes", "mesh.keep_gathered='12GiB'"]),
        ({"mesh__keep_sums": "1GiB"}, ["keep-of-gradients", "mesh.shard='gradients'"]),
        (
            {"mesh__keep_sums": "1GiB", "mesh__shard": "gradients", "pipeline__schedule": "chimera"},
            ["keep-alone", "mesh.keep_sums='none'"],
        ),
        ({"mesh__keep_gathered": "1GiB"}, ["keep-of-weights", "mesh.shard='optimizer'"]),
        ({"mesh__pipe": 9, "pipeline__num_microbatches": 8}, ["9 stages", "mesh.pipe=8 or less"]),
        (
            {"mesh__tensor": 3},
            ["mesh.tensor=3 does not divide", "rows of the token table=256, model.num_heads=2", "tensor=2,"],
        ),
        (
            {"mesh__tensor": 2, "model__vocab_size": 257, "model__vocab_multiple": 1},
            ["257 = 2 x 128 + 1", "tensor=1,", "or model.vocab_multiple=2"],
        ),
        (
            {"pipeline__vocab_over_pipe": "true", "mesh__pipe": 6, "model__num_layers": 12},
            ["mesh.pipe=6 x mesh.tensor=1 does not divide", "256 = 6 x 42 + 4", "model.vocab_multiple=384"],
        ),
        ({"pipeline__vocab_over_pipe": "true", "mesh__pipe": 1}, ["vocab-over-pipe", "with mesh.pipe=1"]),
        (
            {"pipeline__vocab_over_pipe": "true", "pipeline__head_layers": 2.0},
            ["balance-costs", "pipeline.head_layers=2.0", "set pipeline.head_layers=0.0"],
        ),
        (
            {"pipeline__vocab_over_pipe": "true", "pipeline__schedule": "bpipe"},
            ["vocabulary-pattern", "'bpipe', which has EVICT and LOAD"],
        ),
        ({"mesh__tensor": 2, "model__feed_forward": "511"}, ["model.feed_forward: 511 = 2 x 255 + 1"]),
        ({"model__feed_forward": "4h"}, ["word-or-number", "'auto'"]),
        ({"model__num_positions": "0"}, ["word-or-number", "'auto'"]),
        ({"model__num_positions": "127"}, ["rule positions", "tokens 127 .. 127 have none", "data.seq_len=127"]),
        ({"model__activation": "gelu_tan"}, ["model-activation", "Did you mean 'gelu_tanh'?"]),
        ({"model__norm_epsilon": 0.0}, ["more than 0"]),
        ({"model__vocab_multiple": 0}, ["1 or more"]),
        ({"family": "bert", "model__num_token_types": 1}, ["token-types", "or model.sentence_order=False"]),
        ({"family": "llama", "model__head_size": "65"}, ["rotary-pairs", "model.head_size=66"]),
        ({"family": "llama", "model__sliding_window": "auto"}, ["word-or-number", "'none'"]),
        (
            {"family": "llama", "model__full_every": 2, "model__sliding_window": "8", "model__recompute": "full:1,0"}
            | {"mesh__pipe": 2},
            ["kinds-compose", "by stage"],
        ),
        (
            {"family": "llama", "model__full_first": 1, "model__sliding_window": "8", "mesh__pipe": 2}
            | {"pipeline__schedule": "pipedream_2bw"},
            ["kinds-compose", "no flush", "pipeline.schedule='1f1b'"],
        ),
        ({"family": "deepseek_v3", "model__attention": "cudnn"}, ["attention-latent", "set model.attention='chunked'"]),
        ({"family": "deepseek_v3", "model__num_dense": 8}, ["model.num_dense=8", "dense-layers", "num_dense=7"]),
        ({"family": "deepseek_v3", "model__num_groups": 3}, ["expert-groups", "model.num_groups=3"]),
        (
            {"family": "deepseek_v3", "model__num_groups": 4, "model__experts_per_token": 3},
            ["chosen-experts", "model.experts_per_token=2 or less"],
        ),
        ({"family": "deepseek_v3", "model__scores": "softmax"}, ["router-bias", "model.bias_rate=0.0"]),
        ({"family": "deepseek_v3", "model__bias_rate": 0.0}, ["router-bias", "model.bias_rate=0.001"]),
        (
            {"family": "deepseek_v3", "model__mtp_factor": 0.3, "pipeline__vocab_over_pipe": "true"},
            ["further-token", "set pipeline.vocab_over_pipe=false"],
        ),
        (
            {
                "family": "deepseek_v3",
                "model__mtp_factor": 0.3,
                "model__num_dense": 0,
                "model__attention": "chunked",
                "mesh__context": 2,
            },
            ["further-token", "mesh.context=2", "set mesh.context=1"],
        ),
        (
            {
                "family": "deepseek_v3",
                "model__mtp_factor": 0.3,
                "model__num_dense": 0,
                "pipeline__schedule": "pipedream_2bw",
            },
            ["further-token", "without flush", "set pipeline.schedule='1f1b'"],
        ),
        (
            {
                "family": "deepseek_v3",
                "model__mtp_factor": 0.3,
                "model__scores": "softmax",
                "model__bias_rate": 0.0,
            },
            ["rule mtp", "model.scores='sigmoid'"],
        ),
        ({"family": "deepseek_v3", "model__rotary_size": 33}, ["rotary-pairs", "model.rotary_size=34"]),
        ({"family": "deepseek_v3", "model__score_mscale": 1.0}, ["score-mscale", "model.score_mscale=0.0"]),
        (
            {"family": "deepseek_v3", "mesh__data": 2, "mesh__pipe": 2, "mesh__shard": "weights"},
            ["kinds-compose", "mesh.shard='optimizer'"],
        ),
        ({"family": "gpt_oss", "model__attention": "cudnn"}, ["attention-sinks", "set model.attention='chunked'"]),
        ({"family": "llama", "model__full_every": 2}, ["full-layers", "model.sliding_window='none'"]),
        ({"family": "llama", "model__full_every": 1, "model__sliding_window": "8"}, ["full-layers", "full_every=2"]),
        ({"family": "llama", "model__rope_scaling": "longrope"}, ["field-choice", "dynamic, linear, llama3, yarn"]),
        (
            {"family": "llama", "model__rope_scaling": "dynamic", "model__rope_scaling_factor": 2.0}
            | {"model__rope_original_positions": 64},
            ["rope-dynamic", "data.seq_len=128", "data.seq_len=64"],
        ),
        (
            {"family": "llama", "model__rope_scaling": "yarn", "model__rope_scaling_factor": 2.0}
            | {"model__rope_theta": 1.0},
            ["rope-base", "rope_theta=1.0"],
        ),
        ({"family": "llama", "model__rope_scaling": "linear"}, ["rope-scaling", "no effect", "factor=1.0"]),
        (
            {
                "family": "llama",
                "model__rope_scaling": "linear",
                "model__rope_scaling_factor": 2.0,
                "model__rope_high_frequency_factor": 8.0,
            },
            ["rope-scaling", "only rope_scaling_factor have", "leave rope_high_frequency_factor out"],
        ),
        ({"mesh__tensor": 2, "data__seq_len": 127}, ["tensor-divides", "data.seq_len: 127 = 2 x 63 + 1"]),
        ({"family": "llama", "mesh__tensor": 2, "model__num_kv_heads": 1}, ["model.num_kv_heads=1\n", "tensor=1,"]),
        ({"family": "llama", "mesh__tensor": 2, "model__feed_forward": 301}, ["model.feed_forward=301\n"]),
        (  # layers of two kinds, of one width
            {"family": "llama", "mesh__tensor": 2, "model__feed_forward": 301}
            | {"model__sliding_window": "8", "model__full_every": 2},
            ["model.feed_forward=301\n"],
        ),
        ({"family": "llama", "model__num_kv_heads": 3}, ["grouped-heads"]),
        ({"family": "llama", "model__rope_scaling_factor": 0.5}, ["1 or more"]),
        ({"family": "llama", "model__rope_original_positions": 4096}, ["rope-scaling", "no effect", "factor=1.0"]),
        (
            {"family": "llama", "model__rope_scaling_factor": 8.0, "model__rope_low_frequency_factor": 4.0},
            ["rope-frequencies", "less than 4.0"],
        ),
        ({"family": "llama", "model__norm_epsilon": 0.0}, ["more than 0"]),
        ({"model__hidden_dropout": 1.0}, ["less than 1.0"]),
        ({"model__attention_dropout": -0.1}, ["0 or more"]),
        ({"model__embedding_dropout": float("nan")}, ["a finite number"]),
        (
            {"model__attention": "cudnn", "model__dtype": "bfloat16", "model__attention_dropout": 0.1},
            ["attention-cudnn", "attention_dropout=0.1", "'chunked'"],
        ),
        ({"model__attention": "cudnn"}, ["attention-cudnn", "float32"]),
        ({"pipeline__layers_per_stage": "1,1,1,1,1,1,2"}, ["7 counts", "together 8", "'1,1,1,1,1,1,1,1'"]),
        ({"pipeline__layers_per_stage": "4,5", "mesh__pipe": 2}, ["layers-of-stages", "together 9", "'4,4'"]),
        ({"pipeline__layers_per_stage": "0,8", "mesh__pipe": 2}, ["the least 0", "'auto'"]),
        ({"pipeline__layers_per_stage": "even"}, ["not a list of counts", "'auto'"]),
        (
            {"model__recompute": "full:1,1,0", "mesh__pipe": 2},
            ["recompute-list", "3 counts", "2 stages on 2", "'full:2,0'"],
        ),
        ({"model__recompute": "full:5,0", "mesh__pipe": 2}, ["recompute-layers", "5 layers of stage 0", "4,4"]),
        ({"model__recompute": "full:1,-1", "mesh__pipe": 2}, ["recompute-list", "not a list of counts"]),
        (
            {"model__recompute": "ful:1,1", "mesh__pipe": 2},
            ["field-choice", "'ful' is not known", "Did you mean 'full'"],
        ),
        ({"model__recompute": "none:1,1", "mesh__pipe": 2}, ["field-choice", "'none' is not known"]),
        ({"model__recompute": "auto"}, ["model-recompute", "'auto' is not known"]),
        ({"model__recompute": "auto:70"}, ["recompute-bytes", "'auto:70GiB'"]),
        (
            {"model__recompute": "attention:1,1", "model__attention": "chunked", "mesh__pipe": 2},
            ["recompute-attention", "'chunked' keeps as little"],
        ),
        (
            {"model__recompute": "full:1,1", "mesh__pipe": 2, "pipeline__schedule": "pipedream_2bw"},
            ["recompute-flush", "all layers save alike"],
        ),
        (
            {"pipeline__layers_per_stage": "3,5", "mesh__pipe": 2, "pipeline__head_layers": 1.0},
            ["balance-costs", "counts ignore them", "pipeline.head_layers=0.0"],
        ),
        ({"pipeline__embedding_layers": -1.0}, ["0 or more"]),
        ({"model__hidden": 130, "model__num_heads": 4}, ["hidden-per-head", "128", "132"]),
        ({"model__attention": "flash"}, ["model-attention", "xla"]),
        ({"model__vocab_size": 255}, ["vocabulary", "model.vocab_size=256"]),
        ({"model__dtype": "float16"}, ["model.dtype", "bfloat16"]),
        ({"train__steps": 0}, ["train.steps=0", "1 or more"]),
        ({"train__log_every": 0}, ["train.log_every=0", "1 or more"]),
        ({"optimizer__warmup_steps": -1}, ["optimizer.warmup_steps=-1", "0 or more"]),
        ({"optimizer__warmup_steps": 300}, ["optimizer.warmup_steps=300 in train.steps=300", "warmup_steps=150, or"]),
        ({"optimizer__learning_rate": 0.0}, ["more than 0"]),
        ({"data__heldout_fraction": 0.6}, ["at most 0.5"]),
        ({"optimizer__beta1": 1.0}, ["optimizer.beta1=1.0", "less than 1.0"]),
        ({"optimizer__average_decay": 1.0}, ["optimizer.average_decay=1.0", "less than 1.0"]),
        ({"optimizer__average_decay": -0.5}, ["optimizer.average_decay=-0.5", "0 or more"]),
        ({"optimizer__beta2": 1.0}, ["optimizer.beta2=1.0", "less than 1.0"]),
        ({"optimizer__beta2": 0.99999999}, ["optimizer.beta2=0.99999999", "less than 1.0"]),  # 1 in float32
        ({"optimizer__epsilon": 1e-50}, ["optimizer.epsilon=1e-50", "at least 1.2e-38"]),
        ({"optimizer__max_grad_norm": 1e50}, ["a finite number, at most 3.4e+38"]),
        ({"train__lost_after_s": 1e10}, ["at most 1000000000.0"]),
        ({"optimizer__beta2": float("inf")}, ["optimizer.beta2=inf", "a finite number"]),
        ({"optimizer__max_grad_norm": float("inf")}, ["optimizer.max_grad_norm=inf", "a finite number"]),
        ({"optimizer__weight_decay": float("nan")}, ["optimizer.weight_decay=nan", "a finite number"]),
        ({"data__seed": 2**32}, ["data.seed=4294967296", "at most 4294967295"]),
        ({"train__seed": 2**32}, ["train.seed=4294967296", "at most 4294967295"]),
        ({"train__seed": -1}, ["0 or more"]),
    ],
)
def test_one_broken_rule_is_reported_alone_with_its_repair(values, words):
    with pytest.raises(ConfigError, match=r"^1 rule broken in here\n") as error:
        check(_with(**values), name="here")
    for word in [*words, "  rule ", "  repair: "]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer__beta1": 0.0},
        {"optimizer__warmup_steps": 299},
        {"optimizer__final_learning_rate_fraction": 0.0},
        {"data__seed": 2**32 - 1, "train__seed": 2**32 - 1},
        {"mesh__tensor": 2, "model__hidden_dropout": 0.999},
        {"model__attention": "cudnn", "model__dtype": "bfloat16", "model__hidden_dropout": 0.1},
        {"family": "llama", "model__rope_scaling_factor": 8.0, "model__rope_original_positions": 4096},
        {"family": "llama", "mesh__tensor": 2},
    ],
)
def test_the_ends_of_a_range_are_legal(values):
    check(_with(**values))


def test_a_family_is_chosen_where_the_config_is_made():
    with pytest.raises(
        ConfigError, match=r"model.family='llama' in a config with the fields of another family"
    ) as error:
        check(_with(model__family="llama"))
    assert "repair: leave model.family as it was, or take a config of base_config(family='llama')" in str(error.value)
    with pytest.raises(ConfigError, match=r"'lama' is not known. Did you mean 'llama'\?"):
        base_config("lama")
    with pytest.raises(ConfigError, match=r"'lama' is not known. Did you mean 'llama'\?"):
        check(_with(model__family="lama"))


def test_the_model_takes_every_field_of_its_family():
    gpt = _with(
        model__num_layers=3,
        model__hidden=20,
        model__num_heads=5,
        model__feed_forward="50",
        model__vocab_size=300,
        model__vocab_multiple=64,
        model__num_positions="11",
        model__norm_epsilon=0.5,
        model__activation="relu",
        model__tie_embeddings=False,
        model__embedding_dropout=0.1,
        model__attention_dropout=0.2,
        model__hidden_dropout=0.3,
        model__attention="chunked",
        model__recompute="full",
        data__seq_len=9,
    )
    sizes: dict[str, Any] = {
        "num_layers": 3,
        "hidden": 20,
        "num_heads": 5,
        "feed_forward": 50,
        "vocab_size": 300,
        "vocab_multiple": 64,
        "num_positions": 11,
        "norm_epsilon": 0.5,
        "activation": "relu",
        "tie_embeddings": False,
        "embedding_dropout": 0.1,
        "attention_dropout": 0.2,
        "hidden_dropout": 0.3,
        "attention": "chunked",
        "recompute": "full",
    }
    assert model_config(gpt) == GPTConfig(**sizes)
    bert = base_config("bert")
    bert.model.update({name: str(size) if type(bert.model[name]) is str else size for name, size in sizes.items()})
    bert.model.update(num_token_types=3, sentence_order=False)
    assert model_config(bert) == BertConfig(**sizes, num_token_types=3, sentence_order=False)
    llama = _with(
        "llama",
        model__num_layers=3,
        model__hidden=24,
        model__num_heads=6,
        model__num_kv_heads=2,
        model__feed_forward=50,
        model__head_size="10",
        model__vocab_size=300,
        model__vocab_multiple=64,
        model__tie_embeddings=True,
        model__query_key_value_bias=True,
        model__output_bias=True,
        model__feed_forward_bias=True,
        model__sliding_window="7",
        model__full_first=1,
        model__full_every=2,
        model__rope_theta=5.0,
        model__rope_scaling_factor=2.0,
        model__rope_low_frequency_factor=3.0,
        model__rope_high_frequency_factor=7.0,
        model__rope_original_positions=11,
        model__norm_epsilon=0.5,
        model__attention="chunked",
        model__recompute="full",
    )
    scaling = RotaryScaling(factor=2.0, low_freq_factor=3.0, high_freq_factor=7.0, original_max_position=11)
    model = LlamaConfig(
        num_layers=3,
        hidden=24,
        num_heads=6,
        num_kv_heads=2,
        feed_forward=50,
        head_size=10,
        vocab_size=300,
        vocab_multiple=64,
        tie_embeddings=True,
        query_key_value_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        sliding_window=7,
        full_first=1,
        full_every=2,
        rope_theta=5.0,
        rope_scaling=scaling,
        norm_epsilon=0.5,
        attention="chunked",
        recompute="full",
    )
    assert model_config(llama) == model
    llama.model.rope_scaling = "linear"
    assert model_config(llama) == replace(model, rope_scaling=RotaryScaling("linear", 2.0))
    llama.model.rope_scaling_factor = 1.0
    unscaled = model_config(llama)
    assert isinstance(unscaled, LlamaConfig)
    assert unscaled.rope_scaling is None


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_derived_is_derived_from_the_config(family):
    model = model_config(_with(family, model__hidden=64, model__num_heads=4, data__seq_len=64))
    if isinstance(model, LlamaConfig):
        size = model.plain_size + model.rotary_size if isinstance(model, DeepseekConfig) else 16
        assert (model.anatomy.head_size, model.anatomy.window) == (size, 128 if family == "gpt_oss" else None)
    else:
        assert (model.num_positions, model.feed_forward) == (64, None)
    assert model.anatomy.num_rows == (384 if family == "bert" else 256)  # the next multiple of 128


def test_layers_per_stage_are_the_given_counts_or_the_most_balanced():
    four = {"model__num_layers": 16, "mesh__pipe": 4}
    assert layers_per_stage(_with(**four, pipeline__layers_per_stage="4,4,3,5")) == (4, 4, 3, 5)
    assert layers_per_stage(_with(**four, pipeline__layers_per_stage="4, 4, 3, 5")) == (4, 4, 3, 5)
    assert layers_per_stage(_with(**four)) == (4, 4, 4, 4)
    costs = {"pipeline__embedding_layers": 1.0, "pipeline__head_layers": 3.0}
    assert layers_per_stage(_with(**four, **costs)) == (4, 5, 5, 2)


# A matrix product has one product in forward, one in I and one in W; a layer that is computed again, one more in I.
@pytest.mark.parametrize(
    ("values", "times"),
    [
        ({}, (1, 2, 1, 1)),
        ({"model__recompute": "attention"}, (1, 2, 1, 1)),
        ({"model__recompute": "full"}, (1, 3, 2, 1)),
        ({"pipeline__costs": "forward=2,backward=5,input_gradient=3,weight_gradient=1.5"}, (2, 5, 3, 1.5)),
        ({"pipeline__costs": "input_gradient=1.5", "model__recompute": "full"}, (1, 3, 1.5, 1)),
        (
            {"pipeline__schedule": "zb_v", "pipeline__options": "input_gradient=1.2,weight_gradient=0.8"},
            (1, 2, 1.2, 0.8),
        ),
        (
            {
                "pipeline__schedule": "zb_v",
                "pipeline__options": "input_gradient=1.2",
                "pipeline__costs": "weight_gradient=0.7",
            },
            (1, 2, 1, 0.7),
        ),
    ],
)
def test_expected_costs_are_those_of_recomputation_of_the_options_or_given(values, times):
    costs = expected_costs(_with(**values))
    assert (costs.forward, costs.backward, costs.input_gradient, costs.weight_gradient) == times


NUMBERS = [
    (family, path)
    for family in FAMILIES
    for path in (
        f"{section}.{field}"
        for section, fields in base_config(family).items()
        for field, value in fields.items()
        if type(value) is int or field in FAMILIES[family].words
    )
]


@pytest.mark.parametrize("number", [10**12, 10**400, 10**5000], ids=["1e12", "1e400", "1e5000"])
def test_no_number_of_a_config_is_believed_whatever_it_is(number):
    """Of every whole number in every family: a slip of some digits must not be allocated, nor be a traceback."""
    for family, path in NUMBERS:
        config = base_config(family)
        section, field = path.split(".")
        written = "9" * 13 if number == 10**12 else "9" * 5000
        config[section][field] = written if isinstance(config[section][field], str) else number
        with pytest.raises(ConfigError, match=r"field-range|word-or-number"):
            check(config)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data__batch_size": 2**20, "data__seq_len": 2**12}, ["data.batch_size x data.seq_len is at most"]),
        (
            {"mesh__data": 2**12, "mesh__pipe": 2**12},
            ["mesh.data x mesh.pipe x mesh.context x mesh.expert x mesh.tensor is at most"],
        ),
        ({"model__num_layers": 10_000, "model__hidden": 2**20}, ["model.num_layers x model.hidden is at most"]),
        ({"model__num_layers": 10**9}, ["model.num_layers is at most 10000"]),
    ],
)
def test_sizes_are_bounded_together_too(values, words):
    with pytest.raises(ConfigError) as error:
        check(_with(**values))
    for word in (*words, "repair: "):
        assert word in str(error.value)


def test_all_broken_rules_of_a_round_are_reported():
    with pytest.raises(ConfigError, match="3 rules broken") as error:
        check(_with(data__batch_size=33, mesh__pipe=9, model__attention="flash"))
    assert str(error.value).count("repair:") == 3


def test_wrong_types_are_reported_before_anything_uses_them():
    config = base_config()
    with config.ignore_type():
        config.model.hidden = "wide"
    with pytest.raises(ConfigError, match=r"model.hidden='wide' is of type str\n *rule field-type"):
        check(config)


# ---- A config as a value


@pytest.mark.parametrize("family", [*FAMILIES, "given"])
def test_the_value_of_a_config_has_its_fields_and_cannot_be_written(family):
    config = base_config(family)
    value = RunConfig.of(config)
    assert value.to_dict() == config.to_dict()
    assert RunConfig.of(base_config(family)) == value
    assert hash(RunConfig.of(base_config(family))) == hash(value)
    for holder, name in ((value, "train"), (value.train, "steps"), (value.model, "num_layers"), (value.mesh, "pipe")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(holder, name, 1)


def test_fields_are_replaced_in_a_value_of_its_own():
    value = RunConfig.of(base_config())
    changed = value.replaced({"mesh.pipe": 2, "model.hidden": 64, "pipeline.num_microbatches": 4})
    assert (changed.mesh.pipe, changed.model.hidden, changed.microbatch_size) == (2, 64, 8)
    assert value == RunConfig.of(base_config())
    differ = {path for path, told in changed.by_path.items() if told != value.by_path[path]}
    assert differ == {"mesh.pipe", "model.hidden", "pipeline.num_microbatches"}


def test_a_field_that_is_none_has_no_value():
    config = base_config().unlock()
    config.train.stepz = 3
    with pytest.raises(ConfigError, match=r"(?s)stepz.*rule config-fields"):
        check(config)


def test_a_run_says_what_it_does():
    config = _with(pipeline__schedule="zb_h1", optimizer__name="muon", mesh__pipe=4, train__steps=7)
    spec = resolve(config, platform="cpu")
    assert (spec.config.mesh.platform, config.mesh.platform) == ("cpu", "auto")
    text = "\n".join(spec.lines("in one node"))
    said = (
        "float32, attention xla, recompute none",
        "pipe 4",
        "shard optimizer",
        "in one node",
        "32 sequences of 128 tokens; a microbatch has 2 of them",
        "muon, cosine from 0.001, decay 0.1, gradients clipped at norm 1;",
        "7 steps",
    )
    assert [part for part in said if part not in text] == []
    averaged = resolve(_with(optimizer__average_decay=0.99)).lines("")[-1]
    assert "average of the weights by 0.99" in averaged
    # The config's own optimizer is not the run's.
    assert "given in Python, gradients clipped" in spec.lines("", optimizer_is_given=True)[-1]
    assert "muon" not in spec.lines("", optimizer_is_given=True)[-1]
    assert spec.optimizer.reads_matrices
    assert spec.layers_per_stage == layers_per_stage(config)
    assert hash(spec) == hash(resolve(config, platform="cpu"))
    assert spec.schedule is resolve(config, platform="cpu").schedule  # built once


@pytest.mark.parametrize("path", [path for path in RunConfig.of(base_config()).by_path if path[:5] != "model"])
def test_every_field_but_of_a_model_declares_what_is_legal_beside_it(path):
    """Its own default is; a number one below the least and one above the most are not."""
    value = RunConfig.of(base_config()).by_path[path]
    legal = legal_of(path)
    legal.check(path, value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    wrong = [-1 if legal.least == 0 else 0]
    wrong += [] if legal.most_of(value) is None else [legal.most_of(value) + 1]
    wrong += [1.0] * legal.is_below_one
    for number in wrong:
        with pytest.raises(ConfigError, match="rule field-range"):
            legal.check(path, type(value)(number))
