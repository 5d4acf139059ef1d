"""LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM: one table of tensors, four configs.

The four differ in which linear layers have biases, in norms of queries and keys, in sliding windows and in defaults.
Source: transformers, models/{llama,mistral,qwen2,qwen3}/modeling_*.py and configuration_*.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.mapping import (
    SAME,
    SEPARATE_QKV_BIASES,
    SEPARATE_QKV_WEIGHTS,
    TOKEN_ROWS,
    TRANSPOSED,
    Architecture,
    Field,
    Parameter,
    linear,
    not_supported,
)
from jaxpipe.models import LlamaConfig
from jaxpipe.models.rotary import ROTARY_SCALINGS, RotaryScaling

LAYER = "model.layers.{layer}"

ORIGINAL = "original_max_position_embeddings"
# Their names of what a scaling reads; "longrope" has factors of its own for each plane and length.
ROPE_NAMES = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": ORIGINAL,
    "beta_slow": "beta_slow",
    "beta_fast": "beta_fast",
    "attention_factor": "attention_factor",
    "truncate": "truncate",
}
# Of "yarn", which files may lack; transformers takes a beta of 0 as missing, too.
ROPE_OPTIONAL = ("beta_slow", "beta_fast", "attention_factor", "truncate")
# What some kind reads, and files may have beside another kind; transformers warns of them.
ROPE_KNOWN = {
    *ROPE_NAMES.values(),
    "rope_type",
    "type",
    "rope_theta",
    "partial_rotary_factor",
    "mscale",
    "mscale_all_dim",
}
DEFAULT_THETA = 10000.0  # PreTrainedConfig.default_theta, and the default of the configs in version 4


def _three(kind: str) -> tuple[str, ...]:
    return tuple(f"{LAYER}.self_attn.{name}_proj.{kind}" for name in "qkv")


PARAMETERS = (
    Parameter("shared.embedding.token", ("model.embed_tokens.weight",), TOKEN_ROWS, also_tied=("lm_head.weight",)),
    Parameter("layers.attention.norm.scale", (f"{LAYER}.input_layernorm.weight",), SAME),
    Parameter("layers.attention.query_key_value.kernel", _three("weight"), SEPARATE_QKV_WEIGHTS),
    Parameter("layers.attention.query_key_value.bias", _three("bias"), SEPARATE_QKV_BIASES),
    Parameter("layers.attention.query_norm.scale", (f"{LAYER}.self_attn.q_norm.weight",), SAME),
    Parameter("layers.attention.key_norm.scale", (f"{LAYER}.self_attn.k_norm.weight",), SAME),
    *linear("layers.attention.output", f"{LAYER}.self_attn.o_proj", TRANSPOSED),
    Parameter("layers.feed_forward.norm.scale", (f"{LAYER}.post_attention_layernorm.weight",), SAME),
    *linear("layers.feed_forward.gate", f"{LAYER}.mlp.gate_proj", TRANSPOSED),
    *linear("layers.feed_forward.up", f"{LAYER}.mlp.up_proj", TRANSPOSED),
    *linear("layers.feed_forward.down", f"{LAYER}.mlp.down_proj", TRANSPOSED),
    Parameter("shared.head.norm.scale", ("model.norm.weight",), SAME),
    Parameter("shared.head.kernel", ("lm_head.weight",), TOKEN_ROWS),
)

SUPPORTED = {
    "hidden_act": ("silu", "swish"),
    # Some files have null for no dropout.
    "attention_dropout": (0.0, None),
}

# Tables that old versions saved among the parameters.
BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _fields(
    vocab_size: int, feed_forward: int, num_kv_heads: int | None, head_size: int | None = None
) -> tuple[Field, ...]:
    """The fields that the classes share, with the defaults of one."""
    return (
        Field("num_layers", "num_hidden_layers", 32),
        Field("hidden", "hidden_size", 4096),
        Field("num_heads", "num_attention_heads", 32),
        Field("num_kv_heads", "num_key_value_heads", num_kv_heads),
        Field("head_size", "head_dim", head_size),
        Field("feed_forward", "intermediate_size", feed_forward),
        Field("vocab_size", "vocab_size", vocab_size),
        Field("norm_epsilon", "rms_norm_eps", 1e-6),
        Field("tie_embeddings", "tie_word_embeddings", False),
    )


# One flag of theirs for two of ours, since Qwen2 has biases on queries, keys and values alone; the last one is written.
_BIASES = (Field("output_bias", "attention_bias", False), Field("query_key_value_bias", "attention_bias", False))


def _qwen_windows(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The window, and which layers have none; refuses lists of kinds that are no first layers and each so manieth."""
    # A window stands in the file also where it is not used.
    window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None
    num_layers = theirs.get("num_hidden_layers", 32)
    first = theirs.get("max_window_layers", 28)
    kinds = theirs.get("layer_types")
    windows = {"full_first": first, "full_every": 0} if kinds is None else windows_of(kinds, num_layers, where)
    # Without a window all layers attend fully, whatever their kinds are called.
    if window is None or windows["full_first"] >= num_layers:
        return {"sliding_window": None}
    return {"sliding_window": window, **windows}


def windows_of(kinds: Sequence[str], num_layers: int, where: str) -> dict[str, int]:
    """Returns our full_first and full_every for their `layer_types`; ConfigError if these say something else."""
    is_full = [kind == "full_attention" for kind in kinds]
    first = [*is_full, False].index(False)
    rest = is_full[first:]
    every = rest.index(True) + 1 if any(rest) else 0
    expected = [every > 0 and place % every == 0 for place, _ in enumerate(rest, 1)]
    if len(kinds) != num_layers or not set(kinds) <= {"full_attention", "sliding_attention"} or rest != expected:
        raise not_supported(where, "layer_types", kinds, ())
    return {"full_first": first, "full_every": every}


def _read_qwen2(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {**_qwen_windows(theirs, where), **read_rope(theirs, where)}


def _write_qwen2(config: LlamaConfig) -> dict[str, Any]:
    has_window = config.sliding_window is not None
    kinds = [("sliding_attention", "full_attention")[kind] for kind in config.pattern.kinds(config.num_layers)]
    return {
        "use_sliding_window": has_window,
        "sliding_window": config.sliding_window,
        # So many first layers have no window: 0 gives it to all.
        "max_window_layers": config.full_first if has_window else config.num_layers,
        **({"layer_types": kinds} if config.full_every else {}),
        **write_rope(config),
    }


def read_rope(theirs: Mapping[str, Any], where: str, *, default_theta: float = DEFAULT_THETA) -> dict[str, Any]:
    """Returns our rope_theta and rope_scaling, from a config.json of transformers 4 or 5.

    Version 4 has `rope_theta` and `rope_scaling`, with the kind under "type" or "rope_type"; version 5 has all of it in
    `rope_parameters`. An original length at the top comes before the one inside, as in transformers.

    Raises:
        ConfigError: a kind of scaling that jaxpipe does not support, or rotary positions for a part of each head.
    """
    # Version 5 may have both, of which `rope_scaling` is empty then.
    name = "rope_scaling" if theirs.get("rope_scaling") else "rope_parameters"
    rope = theirs.get(name) or {}
    for key, value in rope.items():
        if isinstance(value, dict):  # parameters for each kind of layer
            raise not_supported(where, f"{name}.{key}", value, ())
    part = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor", 1.0))
    # None is a field that is there and says nothing.
    if part not in (None, 1.0):
        raise not_supported(where, "partial_rotary_factor", part, (1.0,))
    unknown = sorted(rope.keys() - ROPE_KNOWN)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *ROTARY_SCALINGS):
        raise not_supported(where, f"{name}.rope_type", kind, ("default", *ROTARY_SCALINGS))
    if unknown:
        raise not_supported(where, f"{name}.{unknown[0]}", rope[unknown[0]], ())
    # Inside in version 5, at the top in version 4.
    theta = rope.get("rope_theta", theirs.get("rope_theta", default_theta))
    original = theirs.get(ORIGINAL)
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    longest = theirs.get("max_position_embeddings")
    # transformers 5 uses the longest sequence if the original one is missing.
    rope = {ORIGINAL: longest, **rope}
    if original is not None:
        rope[ORIGINAL] = original
    if kind == "dynamic":  # up to this length transformers scales nothing, whatever was the original one
        rope[ORIGINAL] = longest
    if kind == "yarn":
        rope |= _of_yarn(rope, longest)
    names = {own: ROPE_NAMES[own] for own in ROTARY_SCALINGS[kind].fields.values()}
    missing = [key for own, key in names.items() if own not in ROPE_OPTIONAL and rope.get(key) is None]
    if missing:
        raise ConfigError(
            f"{where}: {name} of rope_type={kind!r} lacks {', '.join(missing)}",
            rule=f"huggingface-rope: {kind} needs {', '.join(names[own] for own in names if own not in ROPE_OPTIONAL)}",
            repair="use the config.json that the model was saved with",
        )
    scaling = RotaryScaling(kind, **{own: rope[key] for own, key in names.items() if rope.get(key) is not None})
    if scaling.factor == 1.0 and scaling.amplitude != 1.0:
        raise not_supported(where, f"{name}.attention_factor", scaling.amplitude, (1.0,))
    # A factor of 1.0 scales nothing; None makes two such models equal.
    return {"rope_theta": theta, "rope_scaling": None if scaling.factor == 1.0 else scaling}


def _of_yarn(rope: Mapping[str, Any], longest: Any) -> dict[str, Any]:
    """The fields of a "yarn" that follow from others, as `_compute_yarn_parameters` of transformers has them."""
    factor = rope["factor"] if rope.get("factor") is not None else longest / rope[ORIGINAL]
    amplitude = rope.get("attention_factor")
    scales = [float(scale) for scale in (rope.get("mscale"), rope.get("mscale_all_dim")) if scale]
    if amplitude is None and len(scales) == 2:
        numerator, denominator = (0.1 * scale * math.log(max(factor, 1.0)) + 1.0 for scale in scales)
        amplitude = numerator / denominator
    return {
        "factor": factor,
        "attention_factor": amplitude,
        "beta_slow": rope.get("beta_slow") or None,
        "beta_fast": rope.get("beta_fast") or None,
        "truncate": bool(rope.get("truncate", True)),
    }


def write_rope(config: LlamaConfig) -> dict[str, Any]:
    """Returns their rope_theta and rope_scaling, as version 4 writes and 5 reads them, too, and the activation."""
    scaling = config.rope_scaling
    rope = None
    more = {}
    if scaling is not None:
        numbers = {ROPE_NAMES[own]: getattr(scaling, own) for own in ROTARY_SCALINGS[scaling.kind].fields.values()}
        if scaling.kind == "dynamic":
            more = {"max_position_embeddings": numbers.pop(ORIGINAL)}
        if not scaling.attention_factor:  # as it follows from the factor
            numbers.pop("attention_factor", None)
        rope = {"rope_type": scaling.kind, **numbers}
    return {"hidden_act": "silu", "rope_theta": config.rope_theta, "rope_scaling": rope, **more}


LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    "llama",
    PARAMETERS,
    (*_fields(32000, 11008, None), *_BIASES, Field("feed_forward_bias", "mlp_bias", False)),
    SUPPORTED,
    longest=Field("seq_len", "max_position_embeddings", 2048),
    read=read_rope,
    write=write_rope,
    buffers=BUFFERS,
    heads_divide_hidden=True,
)

MISTRAL = replace(
    LLAMA,
    name="MistralForCausalLM",
    model_type="mistral",
    # A missing window is Mistral's first one; null is none.
    fields=(*_fields(32000, 14336, 8), Field("sliding_window", "sliding_window", 4096)),
    longest=Field("seq_len", "max_position_embeddings", 4096 * 32),
    heads_divide_hidden=False,
)

QWEN2 = replace(
    MISTRAL,
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    fields=(*_fields(151936, 22016, 32), Field("query_key_value_bias", "", True)),
    read=_read_qwen2,
    write=_write_qwen2,
    longest=Field("seq_len", "max_position_embeddings", 32768),
)

QWEN3 = replace(
    QWEN2,
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    fields=(*_fields(151936, 22016, 32, 128), *_BIASES, Field("query_key_norm", "", True)),
)
