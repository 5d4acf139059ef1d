"""MegatronBertForPreTraining, and MegatronBertForMaskedLM without the head of the sentence order.

Source: transformers, models/megatron_bert/modeling_megatron_bert.py and configuration_megatron_bert.py.
"""

from __future__ import annotations

from dataclasses import replace

from jaxpipe.huggingface.mapping import (
    ACTIVATIONS,
    SAME,
    SEPARATE_QKV_BIASES,
    SEPARATE_QKV_WEIGHTS,
    TOKEN_ROWS,
    TRANSPOSED,
    Architecture,
    Field,
    Parameter,
    linear,
    norm,
)

LAYER = "bert.encoder.layer.{layer}"
EMBEDDINGS = "bert.embeddings"
PREDICTIONS = "cls.predictions"


def _three(kind: str) -> tuple[str, ...]:
    return tuple(f"{LAYER}.attention.self.{name}.{kind}" for name in ("query", "key", "value"))


PARAMETERS = (
    Parameter(
        "shared.embedding.token",
        (f"{EMBEDDINGS}.word_embeddings.weight",),
        TOKEN_ROWS,
        also_tied=(f"{PREDICTIONS}.decoder.weight",),
    ),
    Parameter("shared.embedding.position", (f"{EMBEDDINGS}.position_embeddings.weight",), SAME),
    Parameter("shared.embedding.token_type", (f"{EMBEDDINGS}.token_type_embeddings.weight",), SAME),
    *norm("layers.attention.norm", f"{LAYER}.attention.ln"),
    Parameter("layers.attention.query_key_value.kernel", _three("weight"), SEPARATE_QKV_WEIGHTS),
    Parameter("layers.attention.query_key_value.bias", _three("bias"), SEPARATE_QKV_BIASES),
    *linear("layers.attention.output", f"{LAYER}.attention.output.dense", TRANSPOSED),
    *norm("layers.feed_forward.norm", f"{LAYER}.ln"),
    *linear("layers.feed_forward.up", f"{LAYER}.intermediate.dense", TRANSPOSED),
    *linear("layers.feed_forward.down", f"{LAYER}.output.dense", TRANSPOSED),
    *norm("shared.head.norm", "bert.encoder.ln"),
    *linear("shared.head.transform", f"{PREDICTIONS}.transform.dense", TRANSPOSED),
    *norm("shared.head.transform_norm", f"{PREDICTIONS}.transform.LayerNorm"),
    Parameter("shared.head.kernel", (f"{PREDICTIONS}.decoder.weight",), TOKEN_ROWS),
    # A file may have the bias under two names, with the same numbers.
    Parameter("shared.head.bias", (f"{PREDICTIONS}.bias",), TOKEN_ROWS, also=(f"{PREDICTIONS}.decoder.bias",)),
    *linear("shared.head.pooler", "bert.pooler.dense", TRANSPOSED),
    *linear("shared.head.sentence_order", "cls.seq_relationship", TRANSPOSED),
)

FIELDS = (
    Field("num_layers", "num_hidden_layers", 24),
    Field("hidden", "hidden_size", 1024),
    Field("num_heads", "num_attention_heads", 16),
    Field("vocab_size", "vocab_size", 29056),
    Field("num_positions", "max_position_embeddings", 512),
    Field("num_token_types", "type_vocab_size", 2),
    Field("feed_forward", "intermediate_size", 4096),
    Field("activation", "hidden_act", "gelu", ACTIVATIONS),
    Field("norm_epsilon", "layer_norm_eps", 1e-12),
    Field("tie_embeddings", "tie_word_embeddings", True),
    # One rate of theirs for two of ours; where ours differ, no config of theirs gives them back, and export says so.
    Field("embedding_dropout", "hidden_dropout_prob", 0.1),
    Field("attention_dropout", "attention_probs_dropout_prob", 0.1),
    Field("hidden_dropout", "hidden_dropout_prob", 0.1),
)

SUPPORTED = {"position_embedding_type": ("absolute",)}

# Old versions saved positions among the parameters.
PRETRAINING = Architecture(
    "MegatronBertForPreTraining",
    "megatron-bert",
    "bert",
    PARAMETERS,
    (*FIELDS, Field("sentence_order", "", True)),
    SUPPORTED,
    longest=Field("seq_len", "max_position_embeddings", 512),
    buffers=(r"bert\.embeddings\.position_ids",),
)

MASKED = replace(PRETRAINING, name="MegatronBertForMaskedLM", fields=(*FIELDS, Field("sentence_order", "", False)))
