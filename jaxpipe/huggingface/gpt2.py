"""GPT2LMHeadModel: its tensors and the fields of its config.

Source: transformers, models/gpt2/modeling_gpt2.py and configuration_gpt2.py. The kernels of its Conv1D are "in out".
"""

from __future__ import annotations

from jaxpipe.huggingface.mapping import (
    ACTIVATIONS,
    FUSED_QKV,
    SAME,
    TOKEN_ROWS,
    Architecture,
    Field,
    Parameter,
    linear,
    norm,
)

LAYER = "transformer.h.{layer}"

PARAMETERS = (
    Parameter("shared.embedding.token", ("transformer.wte.weight",), TOKEN_ROWS, also_tied=("lm_head.weight",)),
    Parameter("shared.embedding.position", ("transformer.wpe.weight",), SAME),
    *norm("layers.attention.norm", f"{LAYER}.ln_1"),
    Parameter("layers.attention.query_key_value.kernel", (f"{LAYER}.attn.c_attn.weight",), FUSED_QKV),
    Parameter("layers.attention.query_key_value.bias", (f"{LAYER}.attn.c_attn.bias",), FUSED_QKV),
    *linear("layers.attention.output", f"{LAYER}.attn.c_proj", SAME),
    *norm("layers.feed_forward.norm", f"{LAYER}.ln_2"),
    *linear("layers.feed_forward.up", f"{LAYER}.mlp.c_fc", SAME),
    *linear("layers.feed_forward.down", f"{LAYER}.mlp.c_proj", SAME),
    *norm("shared.head.norm", "transformer.ln_f"),
    Parameter("shared.head.kernel", ("lm_head.weight",), TOKEN_ROWS),
)

FIELDS = (
    Field("num_layers", "n_layer", 12, alias="num_hidden_layers"),
    Field("hidden", "n_embd", 768, alias="hidden_size"),
    Field("num_heads", "n_head", 12, alias="num_attention_heads"),
    Field("vocab_size", "vocab_size", 50257),
    Field("num_positions", "n_positions", 1024, alias="max_position_embeddings"),
    Field("feed_forward", "n_inner", None),
    Field("activation", "activation_function", "gelu_new", ACTIVATIONS),
    Field("norm_epsilon", "layer_norm_epsilon", 1e-5),
    Field("tie_embeddings", "tie_word_embeddings", True),
    Field("embedding_dropout", "embd_pdrop", 0.1),
    Field("attention_dropout", "attn_pdrop", 0.1),
    Field("hidden_dropout", "resid_pdrop", 0.1),
)

SUPPORTED = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}

# Old versions saved masks among the parameters; some files omit the name of the base model.
GPT2 = Architecture(
    "GPT2LMHeadModel",
    "gpt2",
    "gpt",
    PARAMETERS,
    FIELDS,
    SUPPORTED,
    longest=Field("seq_len", "n_positions", 1024, alias="max_position_embeddings"),
    buffers=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
    prefix="transformer.",
)
