"""LlamaForCausalLM, MistralForCausalLM and Qwen2ForCausalLM: one table of tensors, three configs.

Source: transformers, models/{llama,mistral,qwen2}/modeling_*.py and configuration_*.py. They differ in which
products have biases, in sliding windows and in defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxpipe.huggingface.fields import Field, Only, refusal
from jaxpipe.huggingface.forms import THREE_BIASES, THREE_WEIGHTS, TRANSPOSED, WORDS
from jaxpipe.huggingface.rope import read_rope, write_rope
from jaxpipe.huggingface.rows import Architecture, Row, linear
from jaxpipe.models import LlamaConfig

LAYER = "model.layers.{layer}"


def _three(kind: str) -> tuple[str, ...]:
    return tuple(f"{LAYER}.self_attn.{name}_proj.{kind}" for name in "qkv")


ROWS = (
    Row("shared.embedding.token", ("model.embed_tokens.weight",), WORDS, also_tied=("lm_head.weight",)),
    Row("layers.attention.norm.scale", (f"{LAYER}.input_layernorm.weight",)),
    Row("layers.attention.query_key_value.kernel", _three("weight"), THREE_WEIGHTS),
    Row("layers.attention.query_key_value.bias", _three("bias"), THREE_BIASES),
    *linear("layers.attention.output", f"{LAYER}.self_attn.o_proj", TRANSPOSED),
    Row("layers.feed_forward.norm.scale", (f"{LAYER}.post_attention_layernorm.weight",)),
    *linear("layers.feed_forward.gate", f"{LAYER}.mlp.gate_proj", TRANSPOSED),
    *linear("layers.feed_forward.up", f"{LAYER}.mlp.up_proj", TRANSPOSED),
    *linear("layers.feed_forward.down", f"{LAYER}.mlp.down_proj", TRANSPOSED),
    Row("shared.head.norm.scale", ("model.norm.weight",)),
    Row("shared.head.kernel", ("lm_head.weight",), WORDS),
)

ONLY = (
    Only("hidden_act", ("silu", "swish")),
    Only("attention_dropout", (0.0, None)),
)

# Tables of cosines that old versions kept with the parameters.
BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _fields(vocab_size: int, feed_forward: int, num_kv_heads: int | None) -> tuple[Field, ...]:
    """What the three have in common, with one's own defaults."""
    return (
        Field("num_layers", "num_hidden_layers", 32),
        Field("hidden", "hidden_size", 4096),
        Field("num_heads", "num_attention_heads", 32),
        Field("num_kv_heads", "num_key_value_heads", num_kv_heads),
        Field("head_size", "head_dim", None),
        Field("feed_forward", "intermediate_size", feed_forward),
        Field("vocab_size", "vocab_size", vocab_size),
        Field("norm_epsilon", "rms_norm_eps", 1e-6),
        Field("tie_embeddings", "tie_word_embeddings", False),
    )


def _write_common(config: LlamaConfig) -> dict[str, Any]:
    return {"hidden_act": "silu", **write_rope(config.rope_theta, config.rope_scaling)}


def _read_llama(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    has_bias = theirs.get("attention_bias", False)
    return {
        "query_key_value_bias": has_bias,
        "output_bias": has_bias,
        "feed_forward_bias": theirs.get("mlp_bias", False),
        **read_rope(theirs, where=where),
    }


def _write_llama(config: LlamaConfig) -> dict[str, Any]:
    return {
        "attention_bias": config.query_key_value_bias,
        "mlp_bias": config.feed_forward_bias,
        **_write_common(config),
    }


def _read_mistral(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {"sliding_window": theirs.get("sliding_window", 4096), **read_rope(theirs, where=where)}


def _write_mistral(config: LlamaConfig) -> dict[str, Any]:
    return {"sliding_window": config.sliding_window, **_write_common(config)}


def _read_qwen2(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    return {
        "query_key_value_bias": True,
        "sliding_window": _qwen2_window(theirs, where),
        **read_rope(theirs, where=where),
    }


def _qwen2_window(theirs: Mapping[str, Any], where: str) -> int | None:
    """The window that all layers have, or None; one that only some have is refused."""
    window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None
    num_layers, first = theirs.get("num_hidden_layers", 32), theirs.get("max_window_layers", 28)
    kinds = theirs.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)]
    if set(kinds) == {"full_attention"} or window is None:
        return None
    if set(kinds) != {"sliding_attention"}:
        name = "layer_types" if theirs.get("layer_types") else "max_window_layers"
        raise refusal(where, name, theirs.get(name, 28), (0, num_layers) if name == "max_window_layers" else ())
    return window


def _write_qwen2(config: LlamaConfig) -> dict[str, Any]:
    has_window = config.sliding_window is not None
    return {
        "use_sliding_window": has_window,
        "sliding_window": config.sliding_window,
        "max_window_layers": 0 if has_window else config.num_layers,
        **_write_common(config),
    }


LLAMA = Architecture(
    "LlamaForCausalLM",
    "llama",
    "llama",
    ROWS,
    _fields(32000, 11008, None),
    ONLY,
    read=_read_llama,
    write=_write_llama,
    longest=Field("seq_len", "max_position_embeddings", 2048),
    buffers=BUFFERS,
)

MISTRAL = Architecture(
    "MistralForCausalLM",
    "mistral",
    "llama",
    ROWS,
    _fields(32000, 14336, 8),
    ONLY,
    read=_read_mistral,
    write=_write_mistral,
    longest=Field("seq_len", "max_position_embeddings", 4096 * 32),
    buffers=BUFFERS,
)

QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    "qwen2",
    "llama",
    ROWS,
    _fields(151936, 22016, 32),
    ONLY,
    read=_read_qwen2,
    write=_write_qwen2,
    longest=Field("seq_len", "max_position_embeddings", 32768),
    buffers=BUFFERS,
)
