"""MixtralForCausalLM and Qwen3MoeForCausalLM: LLaMA's and Qwen3's tables with experts in place of the feed forward.

A file has each expert's tensors by themselves; ours are stacked.
Source: transformers, models/{mixtral,qwen3_moe}/modeling_*.py and configuration_*.py; conversion_mapping.py for the
names in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from jaxpipe.huggingface.llama import LAYER, LLAMA, MISTRAL, QWEN3, read_rope
from jaxpipe.huggingface.mapping import EXPERT, STACKED, TRANSPOSED, Field, Parameter
from jaxpipe.models import MixtureConfig

_DENSE = "layers.feed_forward."


def _parameters(block: str, gate: str, up: str, down: str) -> tuple[Parameter, ...]:
    """LLaMA's, with the router and the experts of a `block` in place of the feed forward's kernels."""
    outside = tuple(
        parameter
        for parameter in LLAMA.parameters
        if not parameter.path.startswith(_DENSE) or parameter.path.startswith(f"{_DENSE}norm.")
    )
    return (
        *outside,
        Parameter(f"{_DENSE}router.kernel", (f"{LAYER}.{block}.gate.weight",), TRANSPOSED),
        *(
            # In the order of our `Experts`, since Mixtral's w1, w3 and w2 are gate, up and down.
            Parameter(f"{_DENSE}{ours}.kernel", (f"{LAYER}.{block}.experts.{EXPERT}.{theirs}.weight",), STACKED)
            for ours, theirs in (("gate", gate), ("up", up), ("down", down))
        ),
    )


def _fields(fields: tuple[Field, ...], *more: Field, num_chosen: int, **changed: Field) -> tuple[Field, ...]:
    """`fields` with some of ours read from other ones of theirs, those of routers, and `more`."""
    return (
        *(changed.get(field.ours, field) for field in fields),
        Field("experts_per_token", "num_experts_per_tok", num_chosen),
        Field("balance_loss", "router_aux_loss_coef", 0.001),
        *more,
    )


def _write_mixtral(config: MixtureConfig) -> dict[str, Any]:
    # Jitter is noise of training alone; ours has none.
    return {"router_jitter_noise": 0.0, **MISTRAL.write(config)}


def _read_qwen3_moe(theirs: Mapping[str, Any], where: str) -> dict[str, Any]:
    window = theirs.get("sliding_window", 4096) if theirs.get("use_sliding_window", False) else None
    return {"sliding_window": window, **read_rope(theirs, where)}


def _write_qwen3_moe(config: MixtureConfig) -> dict[str, Any]:
    return {
        **QWEN3.write(config),
        "intermediate_size": config.feed_forward,  # of dense layers, of which there are none
        # Every layer has experts: a step of 1, and no layer that is an exception.
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


MIXTRAL = replace(
    MISTRAL,
    name="MixtralForCausalLM",
    model_type="mixtral",
    family="mixtral",
    parameters=_parameters("block_sparse_moe", "w1", "w3", "w2"),
    fields=_fields(
        MISTRAL.fields,
        Field("num_experts", "num_local_experts", 8, alias="num_experts"),
        Field("normalize_weights", "", True),
        num_chosen=2,
        norm_epsilon=Field("norm_epsilon", "rms_norm_eps", 1e-5),
        # Null or missing is none, unlike Mistral's default.
        sliding_window=Field("sliding_window", "sliding_window", None),
    ),
    supported={**MISTRAL.supported, "router_jitter_noise": (0.0,), "num_shared_experts": (None, 0)},
    read=partial(read_rope, default_theta=1e6),
    write=_write_mixtral,
)

QWEN3_MOE = replace(
    QWEN3,
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    family="qwen3_moe",
    parameters=_parameters("mlp", "gate_proj", "up_proj", "down_proj"),
    fields=_fields(
        QWEN3.fields,
        Field("num_experts", "num_experts", 128, alias="num_local_experts"),
        Field("normalize_weights", "norm_topk_prob", False),
        num_chosen=8,
        hidden=Field("hidden", "hidden_size", 2048),
        num_layers=Field("num_layers", "num_hidden_layers", 24),
        num_kv_heads=Field("num_kv_heads", "num_key_value_heads", 4),
        head_size=Field("head_size", "head_dim", None),
        feed_forward=Field("feed_forward", "moe_intermediate_size", 768),
    ),
    supported={**QWEN3.supported, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
)
