"""DeepseekV2ForCausalLM and DeepseekV3ForCausalLM: latent attention, dense first layers, and experts.

Their rotary dims are pairs of neighbours, ours are halves: the columns of queries and keys that positions turn change
places, which leaves every score as it is. The module of V3 that predicts a further token stands in files as the layer
after the last, 61, with the table of tokens and the logits' kernel once more; transformers leaves it out.
Source: transformers, models/{deepseek_v2,deepseek_v3}/modeling_*.py and configuration_*.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from jaxpipe.huggingface.llama import BUFFERS, LAYER, LLAMA, read_rope, write_rope
from jaxpipe.huggingface.mapping import (
    ANY_VALUE,
    EXPERT,
    SAME,
    STACKED,
    TRANSPOSED,
    Array,
    Field,
    Parameter,
    Transform,
    not_supported,
)
from jaxpipe.models import Anatomy
from jaxpipe.models.deepseek import DeepseekConfig

_ATTENTION = f"{LAYER}.self_attn"
_MLP = f"{LAYER}.mlp"


def _in_halves(columns: Array, size: int, anatomy: Anatomy, *, is_back: bool = False) -> Array:
    """`columns` "... head x size", of each head the rotary part, its last dims, with pairs' firsts before seconds."""
    assert anatomy.rotary_size
    first = size - anatomy.rotary_size
    order = np.concatenate([np.arange(first), np.arange(first, size, 2), np.arange(first + 1, size, 2)])
    order = np.argsort(order) if is_back else order
    heads = columns.reshape(*columns.shape[:-1], -1, size)
    return heads[..., order].reshape(columns.shape)


def _rotary(size_of: Any) -> Transform:
    """The transform of a weight "out in" whose columns, by heads of a size, have a rotary part."""
    return Transform(
        lambda tensors, anatomy: _in_halves(tensors[0].T, size_of(tensors[0].T, anatomy), anatomy),
        lambda array, anatomy: (_in_halves(array, size_of(array, anatomy), anatomy, is_back=True).T,),
    )


QUERIES = _rotary(lambda columns, anatomy: anatomy.head_size)
LATENTS = _rotary(lambda columns, anatomy: columns.shape[-1])  # one rotary part, after all latents


def _parameters(*more: Parameter) -> tuple[Parameter, ...]:
    def kernel(path: str, name: str, transform: Transform = TRANSPOSED) -> Parameter:
        return Parameter(f"layers.{path}.kernel", (f"{name}.weight",), transform)

    def scale(path: str, name: str) -> Parameter:
        return Parameter(f"layers.{path}.scale", (f"{name}.weight",), SAME)

    three = ("gate", "up", "down")
    return (
        scale("attention.norm", f"{LAYER}.input_layernorm"),
        kernel("attention.query_down", f"{_ATTENTION}.q_a_proj"),
        scale("attention.query_norm", f"{_ATTENTION}.q_a_layernorm"),
        kernel("attention.query_up", f"{_ATTENTION}.q_b_proj", QUERIES),
        kernel("attention.query", f"{_ATTENTION}.q_proj", QUERIES),  # without latents of queries
        kernel("attention.latent", f"{_ATTENTION}.kv_a_proj_with_mqa", LATENTS),
        scale("attention.latent_norm", f"{_ATTENTION}.kv_a_layernorm"),
        kernel("attention.key_value", f"{_ATTENTION}.kv_b_proj"),
        kernel("attention.output", f"{_ATTENTION}.o_proj"),
        scale("dense.norm", f"{LAYER}.post_attention_layernorm"),
        *(kernel(f"dense.{name}", f"{_MLP}.{name}_proj") for name in three),
        scale("experts.norm", f"{LAYER}.post_attention_layernorm"),
        kernel("experts.router", f"{_MLP}.gate"),
        *(kernel(f"experts.{name}", f"{_MLP}.experts.{EXPERT}.{name}_proj", STACKED) for name in three),
        *(kernel(f"experts.shared_{name}", f"{_MLP}.shared_experts.{name}_proj") for name in three),
        *more,
    )


_FURTHER = "shared.head.further"
_PROJECTION = f"{_FURTHER}.projection.kernel"
# Its copies of what the model has: the names of both once more, in a model with the module.
_COPIES = {
    "shared.embedding.token": (f"{LAYER}.embed_tokens.weight",),
    "shared.head.kernel": (f"{LAYER}.shared_head.head.weight",),
}
_ENDS = tuple(parameter for parameter in LLAMA.parameters if parameter.path.startswith("shared."))


def _with_further(layers: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
    """The parameters of a model that may have a module which predicts a further token; the same of layers go in."""
    norms = {"token_norm": "enorm", "stream_norm": "hnorm", "norm": "shared_head.norm"}
    return (
        *(replace(parameter, also_with=(_PROJECTION, _COPIES.get(parameter.path, ()))) for parameter in _ENDS),
        *layers,
        *(Parameter(f"{_FURTHER}.{ours}.scale", (f"{LAYER}.{theirs}.weight",), SAME) for ours, theirs in norms.items()),
        Parameter(_PROJECTION, (f"{LAYER}.eh_proj.weight",), TRANSPOSED),
        *(replace(of, path=of.path.replace("layers.", f"{_FURTHER}.block.", 1)) for of in layers),
    )


_LAST_FACTOR = 0.1  # of the published model's further token at the end of its training: section 4.2


def _read_further(theirs: Mapping[str, Any], names: Collection[str], where: str) -> dict[str, Any]:
    """The module, where config.json counts one and files have it; transformers writes its number, and not itself."""
    num = theirs.get("num_nextn_predict_layers") or 0
    if not num or f"{LAYER}.eh_proj.weight".format(layer=theirs.get("num_hidden_layers", 61)) not in names:
        return {}
    if num != 1:
        raise not_supported(where, "num_nextn_predict_layers", num, (0, 1))
    return {"mtp_factor": _LAST_FACTOR}


def _read(theirs: Mapping[str, Any], where: str, *, num_heads: int, scores: str) -> dict[str, Any]:
    heads = theirs.get("num_attention_heads", num_heads)
    num_kv_heads = theirs.get("num_key_value_heads", heads)
    if num_kv_heads not in (None, heads):
        raise not_supported(where, "num_key_value_heads", num_kv_heads, (heads,))
    name = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(name) or {}
    own = read_rope(theirs, where)
    mscale = rope.get("mscale_all_dim") or 0.0
    has_scaling = own["rope_scaling"] is not None
    if mscale and has_scaling and own["rope_scaling"].kind != "yarn":
        raise not_supported(where, f"{name}.mscale_all_dim", mscale, (0.0,))
    return {
        **own,
        "scores": scores,
        "bias_rate": 0.001 if scores == "sigmoid" else 0.0,
        "score_mscale": float(mscale) if has_scaling else 0.0,
    }


def _read_groups_of_v2(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    method = theirs.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise not_supported(where, "topk_method", method, ("greedy", "group_limited_greedy"))
    if method == "greedy":
        return {"num_groups": 1, "groups_per_token": 1}
    return {"num_groups": theirs.get("n_group"), "groups_per_token": theirs.get("topk_group")}


def _write(config: DeepseekConfig) -> dict[str, Any]:
    written = write_rope(config)
    if config.score_mscale:
        # Given by itself: else it would follow from both.
        written["rope_scaling"] |= {
            "mscale_all_dim": config.score_mscale,
            "attention_factor": config.rope_scaling.amplitude if config.rope_scaling else 1.0,
        }
    return {**written, "num_key_value_heads": config.num_heads, "attention_bias": False}


def _write_v2(config: DeepseekConfig) -> dict[str, Any]:
    method = "greedy" if config.num_groups == 1 else "group_limited_greedy"
    return {
        **_write(config),
        "topk_method": method,
        "n_group": config.num_groups,
        "topk_group": config.groups_per_token,
        "norm_topk_prob": False,
        "mlp_bias": False,
    }


def _write_v3(config: DeepseekConfig) -> dict[str, Any]:
    return {**_write(config), "num_nextn_predict_layers": int(config.mtp_factor > 0), "rope_interleave": True}


_SUPPORTED = {
    **LLAMA.supported,
    "attention_bias": (False, None),
    "moe_layer_freq": (1, None),
    "auto_map": ANY_VALUE,  # published files name code of before transformers had these classes
}


def _fields(
    num_layers: int, hidden: int, num_heads: int, dense_width: int, vocab_size: int, **defaults: Any
) -> tuple[Field, ...]:
    return (
        Field("num_layers", "num_hidden_layers", num_layers),
        Field("hidden", "hidden_size", hidden),
        Field("num_heads", "num_attention_heads", num_heads),
        Field("feed_forward", "moe_intermediate_size", defaults["feed_forward"]),
        Field("vocab_size", "vocab_size", vocab_size),
        Field("norm_epsilon", "rms_norm_eps", 1e-6),
        Field("tie_embeddings", "tie_word_embeddings", False),
        Field("num_dense", "first_k_dense_replace", defaults["num_dense"]),
        Field("dense_width", "intermediate_size", dense_width),
        Field("num_shared", "n_shared_experts", defaults["num_shared"]),
        Field("num_experts", "n_routed_experts", defaults["num_experts"], alias=defaults["alias"]),
        Field("experts_per_token", "num_experts_per_tok", defaults["experts_per_token"]),
        Field("weight_scale", "routed_scaling_factor", defaults["weight_scale"]),
        Field("plain_size", "qk_nope_head_dim", 128),
        Field("rotary_size", "qk_rope_head_dim", 64),
        Field("value_size", "v_head_dim", 128),
        Field("latent_size", "kv_lora_rank", 512),
        Field("query_latent_size", "q_lora_rank", 1536),
    )


DEEPSEEK_V2 = replace(
    LLAMA,
    name="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    family="deepseek_v3",
    parameters=(*_ENDS, *_parameters()),
    fields=(
        *_fields(
            32,
            4096,
            32,
            11008,
            102400,
            feed_forward=1407,
            num_dense=0,
            num_shared=2,
            num_experts=64,
            alias="num_experts",
            experts_per_token=None,
            weight_scale=1.0,
        ),
        Field("normalize_weights", "", False),
    ),
    supported={**_SUPPORTED, "mlp_bias": (False,), "norm_topk_prob": (False, None), "scoring_func": ("softmax", None)},
    longest=Field("seq_len", "max_position_embeddings", 2048),
    read=lambda theirs, where: {
        **_read(theirs, where, num_heads=32, scores="softmax"),
        **_read_groups_of_v2(theirs, where),
    },
    write=_write_v2,
    heads_divide_hidden=True,
)

DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    parameters=_with_further(
        _parameters(Parameter("layers.experts.load_bias", (f"{_MLP}.gate.e_score_correction_bias",), SAME))
    ),
    fields=(
        *_fields(
            61,
            7168,
            128,
            18432,
            129280,
            feed_forward=2048,
            num_dense=3,
            num_shared=1,
            num_experts=256,
            alias="num_local_experts",
            experts_per_token=8,
            weight_scale=2.5,
        ),
        Field("num_groups", "n_group", 8),
        Field("groups_per_token", "topk_group", 4),
        Field("normalize_weights", "norm_topk_prob", True),
    ),
    supported={
        **_SUPPORTED,
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid", None),
        "topk_method": ("noaux_tc", None),
    },
    longest=Field("seq_len", "max_position_embeddings", 4096),
    read=partial(_read, num_heads=128, scores="sigmoid"),
    read_names=_read_further,
    write=_write_v3,
    buffers=(*BUFFERS, r"model\.layers\.{layer}\..+"),
    heads_divide_hidden=False,
)
