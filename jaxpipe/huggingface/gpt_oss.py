"""GptOssForCausalLM: Mixtral's table with sinks, biases, and all experts of a layer in one tensor.

Source: transformers, models/gpt_oss/modeling_gpt_oss.py and configuration_gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxpipe.huggingface.llama import LAYER, LLAMA, read_rope, windows_of, write_rope
from jaxpipe.huggingface.mapping import SAME, TRANSPOSED, Field, Parameter, linear
from jaxpipe.models.gpt_oss import GptOssConfig

_DENSE = "layers.feed_forward."
_EXPERTS = f"{LAYER}.mlp.experts"

PARAMETERS = (
    *(
        parameter
        for parameter in LLAMA.parameters
        if not parameter.path.startswith(_DENSE) or parameter.path.startswith(f"{_DENSE}norm.")
    ),
    Parameter("layers.attention.sinks", (f"{LAYER}.self_attn.sinks",), SAME),
    *linear(f"{_DENSE}router", f"{LAYER}.mlp.router", TRANSPOSED),
    # Their experts' weights are "in out", gates and ups in turn, as ours.
    *(
        Parameter(f"{_DENSE}{ours}.{kind}", (f"{_EXPERTS}.{theirs}{ending}",), SAME)
        for ours, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj"))
        for kind, ending in (("kernel", ""), ("bias", "_bias"))
    ),
)

# What a config.json without rotary parameters has.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    has_rope = theirs.get("rope_parameters") or theirs.get("rope_scaling")
    window = theirs.get("sliding_window", 128)
    kinds = theirs.get("layer_types")
    num_layers = theirs.get("num_hidden_layers", 36)
    if window is None:
        windows = {"full_first": 0, "full_every": 0}
    else:
        windows = {"full_first": 0, "full_every": 2} if kinds is None else windows_of(kinds, num_layers, where)
    is_full = kinds is not None and set(kinds) == {"full_attention"}
    return {
        "sliding_window": None if is_full else window,
        **({"full_first": 0, "full_every": 0} if is_full else windows),
        **read_rope(theirs if has_rope else {**theirs, "rope_parameters": _ROPE}, where, default_theta=150000.0),
    }


def _write(config: GptOssConfig) -> dict[str, Any]:
    has_window = config.sliding_window is not None
    names = ("sliding_attention", "full_attention") if has_window else ("full_attention",) * 2
    return {
        "sliding_window": config.sliding_window,
        "layer_types": [names[kind] for kind in config.pattern.kinds(config.num_layers)],
        **write_rope(config),
    }


GPT_OSS = replace(
    LLAMA,
    name="GptOssForCausalLM",
    model_type="gpt_oss",
    family="gpt_oss",
    parameters=PARAMETERS,
    fields=(
        Field("num_layers", "num_hidden_layers", 36),
        Field("hidden", "hidden_size", 2880),
        Field("num_heads", "num_attention_heads", 64),
        Field("num_kv_heads", "num_key_value_heads", 8),
        Field("head_size", "head_dim", 64),
        Field("feed_forward", "intermediate_size", 2880),
        Field("vocab_size", "vocab_size", 201088),
        Field("norm_epsilon", "rms_norm_eps", 1e-5),
        Field("tie_embeddings", "tie_word_embeddings", False),
        Field("output_bias", "attention_bias", True),
        Field("query_key_value_bias", "attention_bias", True),
        Field("num_experts", "num_local_experts", 128, alias="num_experts"),
        Field("experts_per_token", "num_experts_per_tok", 4),
        Field("normalize_weights", "", True),
        Field("balance_loss", "router_aux_loss_coef", 0.001),
        Field("swiglu_alpha", "swiglu_alpha", 1.702),
        Field("swiglu_limit", "swiglu_limit", 7.0),
    ),
    longest=Field("seq_len", "max_position_embeddings", 131072),
    read=_read,
    write=_write,
    heads_divide_hidden=False,
)
