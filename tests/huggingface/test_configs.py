"""A config.json says the same in the words of transformers 4 and 5; what we cannot follow is refused by name."""

import dataclasses
import json
from contextlib import suppress

import numpy as np
import pytest
import their_models
from their_models import BERT, DEEPSEEK_V2, DEEPSEEK_V3, GPT2, GPT_OSS, LLAMA, LLAMA3, QWEN3_MOE

from jaxpipe.config import base_config, check, model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface import configs
from jaxpipe.models.rotary import RotaryScaling

BASE = {"GPT2LMHeadModel": GPT2, "LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA, "Qwen2ForCausalLM": LLAMA}
BASE |= {"Qwen3ForCausalLM": LLAMA | {"head_dim": 8}}
BASE |= {"DeepseekV2ForCausalLM": LLAMA | DEEPSEEK_V2, "DeepseekV3ForCausalLM": LLAMA | DEEPSEEK_V3}
BASE |= {"GptOssForCausalLM": LLAMA | GPT_OSS, "MixtralForCausalLM": LLAMA, "Qwen3MoeForCausalLM": LLAMA | QWEN3_MOE}
BASE |= {"MegatronBertForPreTraining": BERT}


TOKENS = {"bos_token_id", "eos_token_id", "pad_token_id"}


def read(kind: str, **changes):
    return configs.read_config({"architectures": [kind], **BASE[kind], **changes}, where="config.json")


def test_gpt2_of_openai():
    """The config.json of the hub's openai-community/gpt2, less what says nothing of the model."""
    theirs = {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "bos_token_id": 50256,
        "embd_pdrop": 0.1,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "resid_pdrop": 0.1,
        "summary_type": "cls_index",
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        "vocab_size": 50257,
    }
    config = configs.read_config(theirs, where="config.json")
    model = model_config(config)
    assert (model.num_layers, model.hidden, model.num_heads, model.vocab_size) == (12, 768, 12, 50257)
    assert (model.num_positions, model.feed_forward, model.activation) == (1024, None, "gelu_tanh")
    assert (model.embedding_dropout, model.attention_dropout, model.hidden_dropout) == (0.1, 0.1, 0.1)
    assert model.tie_embeddings
    assert model.anatomy.num_rows == 50304  # Megatron-LM's padded GPT-2 vocabulary
    assert config.data.seq_len == 1024


def test_llama_31_of_meta():
    """The config.json of the hub's meta-llama/Llama-3.1-8B, less what says nothing of the model."""
    theirs = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    config = configs.read_config(theirs, where="config.json")
    model = model_config(config)
    assert model.rope_theta == 500000.0
    assert model.rope_scaling == RotaryScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert (model.num_kv_heads, model.feed_forward, model.norm_epsilon) == (8, 14336, 1e-5)
    assert not model.tie_embeddings
    assert config.data.seq_len == 1024


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 50.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
        (
            {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
        ),
        (
            {"rope_theta": 100.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}},
            {"rope_parameters": LLAMA3},
        ),
        ({"rope_theta": 10000.0, "rope_scaling": None}, {}),
    ],
)
def test_rotary_positions_of_transformers_4_and_5_are_the_same(old, new):
    assert read("LlamaForCausalLM", **old) == read("LlamaForCausalLM", **new)
    assert read("LlamaForCausalLM", **old) != read("LlamaForCausalLM", rope_theta=51.0)


def test_what_a_yarn_leaves_out_is_as_in_transformers():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    for same in ({"beta_fast": 32, "beta_slow": None}, {"truncate": True}, {"mscale": 3.0}, {"factor": None}):
        assert read("LlamaForCausalLM", rope_scaling=yarn | same) == read("LlamaForCausalLM", rope_scaling=yarn)
    both = read("LlamaForCausalLM", rope_scaling=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0})
    assert both.model.rope_attention_factor == 1.0
    scaling = model_config(read("LlamaForCausalLM", rope_scaling=yarn)).rope_scaling
    assert scaling == RotaryScaling("yarn", 4.0, original_max_position=16)
    assert scaling.amplitude == pytest.approx(1.13863, rel=1e-5)


def test_a_dynamic_scaling_is_none_up_to_the_longest_sequence():
    config = read("LlamaForCausalLM", rope_scaling={"type": "dynamic", "factor": 2.0})
    assert config.model.rope_original_positions == config.data.seq_len == LLAMA["max_position_embeddings"]
    longer = config.replaced({"data.seq_len": config.data.seq_len + 1})
    with pytest.raises(ConfigError, match="rule rope-dynamic"):
        check(longer)


def test_an_original_length_at_the_top_comes_before_the_one_inside():
    inside = {"rope_parameters": LLAMA3}
    without = {"rope_parameters": {key: value for key, value in LLAMA3.items() if key[:8] != "original"}}
    top = {"original_max_position_embeddings": 16}
    assert read("LlamaForCausalLM", **without, **top) == read("LlamaForCausalLM", **inside)
    longer = read("LlamaForCausalLM", **inside, **top | {"original_max_position_embeddings": 32})
    assert longer.model.rope_original_positions == 32
    assert read("LlamaForCausalLM", **without).model.rope_original_positions == LLAMA["max_position_embeddings"]


# Every class's config, and fields of it, or of all configs, on which no number of the model depends.
CONFIG_CLASSES = {
    "GPT2LMHeadModel": "GPT2Config",
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "MixtralForCausalLM": "MixtralConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "DeepseekV2ForCausalLM": "DeepseekV2Config",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "MegatronBertForPreTraining": "MegatronBertConfig",
    "MegatronBertForMaskedLM": "MegatronBertConfig",
}
HARMLESS = {
    # What is returned, kept or reported.
    "output_attentions": True,
    "output_hidden_states": True,
    "output_router_logits": True,
    "use_cache": False,
    "return_dict": True,
    "transformers_version": "4.0",
    "_name_or_path": "x",
    "dtype": "float32",
    # Numbers of tokens, which generation and the tokenizer read.
    "bos_token_id": 5,
    "eos_token_id": 6,
    "pad_token_id": 7,
    # Of initial parameters, of other heads, and of how the same numbers are computed.
    "initializer_range": 0.5,
    "problem_type": "regression",
    "id2label": {0: "x"},
    "label2id": {"x": 0},
    "summary_activation": "tanh",
    "summary_type": "first",
    "summary_first_dropout": 0.5,
    "summary_proj_to_labels": False,
    "summary_use_proj": False,
    "chunk_size_feed_forward": 2,
    "pretraining_tp": 2,
}
OLD = ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")  # of version 4


class Recording(dict):
    """A config.json that notes which of its fields are read."""

    def __init__(self, fields):
        super().__init__(fields)
        self.was_read = set()

    def get(self, key, default=None):
        self.was_read.add(key)
        return super().get(key, default)

    def __getitem__(self, key):
        self.was_read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.was_read.add(key)
        return super().__contains__(key)


@pytest.mark.ci
@pytest.mark.parametrize("kind", CONFIG_CLASSES)
def test_every_field_of_a_class_is_read_or_harmless(transformers, kind):
    their_class = getattr(transformers, CONFIG_CLASSES[kind])
    fields = their_class().to_dict().keys() | {field.name for field in dataclasses.fields(their_class)}
    fields |= their_class.attribute_map.keys() | (OLD if "rope_parameters" in fields else set())
    window = {"use_sliding_window": True, "max_window_layers": 0}  # without it Qwen's others are not read
    # Without it DeepSeek-V2's groups are not read.
    groups = {"topk_method": "group_limited_greedy"} if kind == "DeepseekV2ForCausalLM" else {}
    theirs = Recording({"architectures": [kind], **BASE.get(kind, BERT), **window, **groups})
    configs.read_config(theirs, where="config.json")
    known = theirs.was_read | HARMLESS.keys() | {"architectures", "model_type"}
    # The width of dense layers, of which jaxpipe's Qwen3-MoE has none.
    known |= {"intermediate_size"} if kind == "Qwen3MoeForCausalLM" else set()
    # Sizes that DeepSeek's configs make from others, whatever a file says, and modules that its class does not have.
    known |= {"head_dim", "qk_head_dim", "num_mtp_layers", "num_nextn_predict_layers"} if "Deepseek" in kind else set()
    assert fields - known == set()


@pytest.mark.ci
@pytest.mark.parametrize("kind", CONFIG_CLASSES)
def test_harmless_fields_change_no_logit_of_transformers(transformers, kind):
    model_class, sizes = getattr(transformers, kind), BASE.get(kind, BERT)
    microbatch = their_models.microbatch("bert" if kind.startswith("Megatron") else "llama")
    model = their_models.new_model(transformers, kind, sizes)
    logits = their_models.their_logits(model, microbatch)
    known = model.config.to_dict()
    for field, value in HARMLESS.items():
        if field in known and field not in ("transformers_version", "return_dict"):
            changed = model_class(model_class.config_class(**sizes | {field: value})).eval()
            changed.load_state_dict(model.state_dict())
            for name, numbers in their_models.their_logits(changed, microbatch).items():
                assert np.array_equal(numbers, logits[name]), field


@pytest.mark.ci
def test_what_a_config_leaves_out_is_as_in_transformers(transformers):
    """Their default, not ours: every class's own config, given nothing, agrees with an empty config.json."""
    of_config = {"GPT2LMHeadModel": "GPT2Config", "MegatronBertForPreTraining": "MegatronBertConfig"}
    of_config |= {f"{name}ForCausalLM": f"{name}Config" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
    for kind, config in of_config.items():
        theirs = getattr(transformers, config)().to_dict() | {"architectures": [kind]}
        empty = configs.read_config({"architectures": [kind]}, where="config.json")
        assert configs.read_config(theirs, where="config.json") == empty


def test_a_converted_config_is_of_its_family():
    config = read("Qwen2ForCausalLM", tie_word_embeddings=True)
    assert config.by_path.keys() == RunConfig.of(base_config("llama")).by_path.keys()


def test_layers_of_qwen2_without_a_window_are_followed():
    window = {"use_sliding_window": True, "sliding_window": 4}

    def windows(**fields):
        model = read("Qwen2ForCausalLM", **window, **fields).model
        return model.sliding_window, model.full_first, model.full_every

    assert windows(max_window_layers=1) == ("4", 1, 0)
    sliding, full = "sliding_attention", "full_attention"
    assert windows(layer_types=[sliding, full, sliding]) == ("4", 0, 2)
    assert windows(layer_types=[full, sliding, full]) == ("4", 1, 2)
    assert windows(layer_types=[full, full, sliding]) == ("4", 2, 0)
    assert windows(layer_types=[sliding, sliding, full]) == ("4", 0, 3)


def test_windows_that_all_layers_of_qwen2_have_are_followed():
    window = {"use_sliding_window": True, "sliding_window": 4}
    assert read("Qwen2ForCausalLM", **window, max_window_layers=0).model.sliding_window == "4"
    assert read("Qwen2ForCausalLM", **window, max_window_layers=3).model.sliding_window == "none"
    assert read("Qwen2ForCausalLM", **window, layer_types=["sliding_attention"] * 3).model.sliding_window == "4"
    assert read("Qwen2ForCausalLM", **window | {"use_sliding_window": False}).model.sliding_window == "none"


REFUSED = [
    ("GPT2LMHeadModel", {"scale_attn_weights": False}, "scale_attn_weights=False"),
    ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
    ("GPT2LMHeadModel", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=True"),
    ("GPT2LMHeadModel", {"activation_function": "tanh"}, "activation_function='tanh'"),
    ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention=True"),
    ("GPT2LMHeadModel", {"is_causal": False}, "is_causal=False"),
    ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("LlamaForCausalLM", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ("LlamaForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ("LlamaForCausalLM", {"auto_map": {"AutoModelForCausalLM": "m.M"}}, "auto_map="),
    (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 2.0, "longer": 3}},
        "rope_scaling.longer=3",
    ),
    (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 0.5}},
        "rope_parameters.attention_factor=0.5",
    ),
    ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope'"),
    (
        "LlamaForCausalLM",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters.full_attention",
    ),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    (
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        },
        "layer_types=['sliding_attention', 'full_attention', 'full_attention']",
    ),
    ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 2}, "layer_types=['full_attention', 'full_attention']"),
    ("GptOssForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    ("GptOssForCausalLM", {"layer_types": ["full_attention"] * 2}, "layer_types=['full_attention', 'full_attention']"),
    ("DeepseekV3ForCausalLM", {"rope_interleave": False}, "rope_interleave=False"),
    ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ("DeepseekV3ForCausalLM", {"topk_method": "greedy"}, "topk_method='greedy'"),
    ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias=True"),
    ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    ("DeepseekV3ForCausalLM", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
    ("DeepseekV3ForCausalLM", {"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4}"),
    (
        "DeepseekV3ForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
        "rope_parameters.mscale_all_dim=1.0",
    ),
    ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob=True"),
    ("DeepseekV2ForCausalLM", {"mlp_bias": True}, "mlp_bias=True"),
    ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
    ("MixtralForCausalLM", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
    ("MixtralForCausalLM", {"num_shared_experts": 1}, "num_shared_experts=1"),
    ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    ("Qwen3MoeForCausalLM", {"mlp_only_layers": [0]}, "mlp_only_layers=[0]"),
    (
        "MegatronBertForPreTraining",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type='relative_key'",
    ),
    ("MegatronBertForPreTraining", {"is_decoder": True}, "is_decoder=True"),
    ("MegatronBertForPreTraining", {"hidden_act": "silu"}, "hidden_act='silu'"),
]


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED, ids=[words.partition("=")[0] for *_, words in REFUSED])
def test_fields_that_change_the_numbers_are_refused_by_name(kind, changes, words):
    with pytest.raises(ConfigError, match="rule huggingface-field") as error:
        read(kind, **changes)
    assert words in str(error.value)
    assert "  repair: " in str(error.value)
    read(kind)


def test_values_of_another_type_are_refused():
    with pytest.raises(ConfigError, match=r"value for model.num_layers is '3', of type str\n *rule field-type"):
        read("LlamaForCausalLM", num_hidden_layers="3")
    with pytest.raises(ConfigError, match=r"value for data.seq_len is None"):
        read("LlamaForCausalLM", max_position_embeddings=None)
    with pytest.raises(ConfigError, match=r"of rope_type='linear' lacks factor\n *rule huggingface-rope"):
        read("LlamaForCausalLM", rope_scaling={"rope_type": "linear"})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"hidden_size": 0},
        {"max_position_embeddings": -5},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": -1.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError, match=r"broken in config.json\n(.|\n)*rule (field-range|rope)"):
        read("LlamaForCausalLM", **changes)


@pytest.mark.parametrize("name", BASE)
def test_no_size_is_believed_whatever_it_is(name):
    """Each is refused at once: a name of a tensor is made for every layer, a kind for every layer of a list."""
    believed = set()
    for field in (field for field, value in BASE[name].items() if type(value) is int):
        with suppress(ConfigError):
            read(name, **{field: 10**12})
            believed.add(field)
    # A run reads at most 1024 tokens, and a window of more is none.
    # Dense layers, of which a Qwen3-MoE has none, have a width too.
    if name == "Qwen3MoeForCausalLM":
        believed.discard("intermediate_size")
    # A DeepSeek-V2 chooses from groups by another `topk_method`.
    if name == "DeepseekV2ForCausalLM":
        believed -= {"n_group", "topk_group"}
    assert believed <= {"max_position_embeddings", "n_positions", "sliding_window", "max_window_layers"} | TOKENS


@pytest.mark.parametrize("rope", ["x", [1], {"rope_type": ["x"]}])
def test_values_that_are_no_values_are_refused(rope):
    with pytest.raises(ConfigError, match="rule huggingface-"):
        read("LlamaForCausalLM", rope_scaling=rope)
    with pytest.raises(ConfigError, match="rule huggingface-architecture"):
        configs.read_config({"architectures": [["x"]]}, where="config.json")


def test_unknown_classes_are_refused():
    with pytest.raises(ConfigError, match=r"'Qwen3_5ForCausalLM'.*Did you mean 'Qwen3ForCausalLM'") as error:
        configs.read_config({"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5"}, where="config.json")
    assert "rule huggingface-architecture" in str(error.value)
    with pytest.raises(ConfigError, match="rule huggingface-architecture"):
        configs.read_config({}, where="config.json")


def test_a_config_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="rule huggingface-folder"):
        configs.load_config(tmp_path)
    for text in ("[]", "{", ""):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match="rule huggingface-config"):
            configs.load_config(tmp_path)


def test_models_that_transformers_does_not_have_are_refused():
    config = base_config("llama")
    config.model.output_bias = True
    with pytest.raises(ConfigError, match="rule huggingface-export") as error:
        configs.new_config(config, dtype="float32")
    assert "LlamaForCausalLM has no model.output_bias=True" in str(error.value)
    config = base_config("bert")
    config.model.embedding_dropout = 0.1
    with pytest.raises(ConfigError, match=r"has no model.embedding_dropout=0.1"):
        configs.new_config(config, dtype="float32")
    config = base_config("mixtral")
    config.model.bias_rate = 0.1
    with pytest.raises(ConfigError, match=r"has no model.bias_rate=0.1"):
        configs.new_config(config, dtype="float32")


@pytest.mark.parametrize("family", ["gpt", "llama", "bert"])
def test_a_new_config_is_json(family):
    theirs = configs.new_config(base_config(family), dtype="bfloat16")
    assert json.loads(json.dumps(theirs)) == theirs
    assert theirs["torch_dtype"] == "bfloat16"
