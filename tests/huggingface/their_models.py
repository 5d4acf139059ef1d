"""Small models of transformers with random numbers in every parameter, and their logits beside ours."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.checkpoints import restore_canonical
from jaxpipe.config import model_config
from jaxpipe.convert import import_model
from jaxpipe.huggingface import configs
from jaxpipe.huggingface.tensor_files import TensorFiles
from jaxpipe.huggingface.tensors import TensorMap
from jaxpipe.models import LanguageModel
from jaxpipe.training.run_folder import read_config

GPT2 = {"vocab_size": 61, "n_positions": 20, "n_embd": 48, "n_layer": 3, "n_head": 4}
LLAMA = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
QWEN3_MOE = {
    "head_dim": 14,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
# Windows of 4 and an original length of 8: sequences of the tests go beyond both.
GPT_OSS = {
    "head_dim": 8,
    "sliding_window": 4,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 2.0,
        "beta_slow": 0.3,
        "truncate": False,
    },
}
# Sequences of the tests go beyond the original length. Groups have four experts, of which few are shared or chosen.
DEEPSEEK_V3 = {
    "num_key_value_heads": 6,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 2,
    "q_lora_rank": 20,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 5,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
DEEPSEEK_V2 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 3,
}
BERT = {
    "vocab_size": 61,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 72,
    "max_position_embeddings": 20,
    "type_vocab_size": 3,
}
# Slow frequencies turn once in more than 16 positions, fast ones four times in less.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Sequences of the tests go beyond its original length.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt2_untied": ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "n_inner": 56}),
    "gpt2_erf": ("GPT2LMHeadModel", GPT2 | {"activation_function": "gelu", "layer_norm_epsilon": 0.1}),
    "gpt2_relu": ("GPT2LMHeadModel", GPT2 | {"activation_function": "relu"}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "llama_tied": ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama_epsilon": ("LlamaForCausalLM", LLAMA | {"rms_norm_eps": 0.1, "num_key_value_heads": 1}),
    "llama3": ("LlamaForCausalLM", LLAMA | {"rope_parameters": LLAMA3}),
    "llama_linear": (
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 3.0}},
    ),
    "llama_yarn": ("LlamaForCausalLM", LLAMA | {"rope_parameters": YARN}),
    "llama_dynamic": (
        "LlamaForCausalLM",
        LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 50.0, "factor": 3.0}},
    ),
    "llama_biases": ("LlamaForCausalLM", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama_heads": ("LlamaForCausalLM", LLAMA | {"head_dim": 14}),
    "mistral": ("MistralForCausalLM", LLAMA | {"sliding_window": 5}),
    "mistral_all": ("MistralForCausalLM", LLAMA | {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", LLAMA),
    "qwen2_yarn": (
        "Qwen2ForCausalLM",
        LLAMA | {"rope_parameters": YARN | {"beta_fast": 3, "beta_slow": 0.2, "truncate": False, "mscale": 2.0}},
    ),
    "qwen2_window": (
        "Qwen2ForCausalLM",
        LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "tie_word_embeddings": True},
    ),
    "qwen2_first_full": (
        "Qwen2ForCausalLM",
        LLAMA | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3_in_turn": (
        "Qwen3ForCausalLM",
        LLAMA
        | {"head_dim": 6, "num_hidden_layers": 5, "use_sliding_window": True, "sliding_window": 4}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
    ),
    "qwen3": ("Qwen3ForCausalLM", LLAMA | {"head_dim": 14}),
    "qwen3_yarn": (
        "Qwen3ForCausalLM",
        LLAMA | {"head_dim": 14, "rope_parameters": YARN | {"attention_factor": 0.7, "beta_fast": 2, "beta_slow": 0.5}},
    ),
    "qwen3_odd": (
        "Qwen3ForCausalLM",
        LLAMA | {"head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen3_one": (
        "Qwen3ForCausalLM",
        LLAMA | {"head_dim": 16, "num_attention_heads": 5, "num_key_value_heads": 1, "attention_bias": True},
    ),
    "qwen3_window": (
        "Qwen3ForCausalLM",
        LLAMA | {"head_dim": 6, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    ),
    "mixtral": ("MixtralForCausalLM", LLAMA | {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral_yarn": (
        "MixtralForCausalLM",
        LLAMA
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 8}  # without which theirs fails
        | {"rope_parameters": YARN | {"mscale": 2.0, "mscale_all_dim": 0.5, "beta_fast": 1.5, "beta_slow": 0.1}},
    ),
    "mixtral_one": (
        "MixtralForCausalLM",
        LLAMA | {"num_local_experts": 7, "num_experts_per_tok": 1, "num_key_value_heads": 1, "sliding_window": 5},
    ),
    "mixtral_odd": (
        "MixtralForCausalLM",
        LLAMA | {"head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", LLAMA | QWEN3_MOE),
    "qwen3_moe_sums": (
        "Qwen3MoeForCausalLM",
        LLAMA | QWEN3_MOE | {"norm_topk_prob": False, "num_attention_heads": 5, "num_key_value_heads": 1},
    ),
    "qwen3_moe_many": (
        "Qwen3MoeForCausalLM",
        LLAMA | QWEN3_MOE | {"num_experts": 33, "num_experts_per_tok": 8, "attention_bias": True},
    ),
    "gpt_oss": ("GptOssForCausalLM", LLAMA | GPT_OSS),
    "gpt_oss_full": (
        "GptOssForCausalLM",
        LLAMA
        | GPT_OSS
        | {"num_attention_heads": 9, "num_key_value_heads": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True}
        | {"layer_types": ["full_attention"] * 3, "swiglu_limit": 0.2, "swiglu_alpha": 1.1},
    ),
    "gpt_oss_first_full": (
        "GptOssForCausalLM",
        LLAMA
        | GPT_OSS
        | {"num_hidden_layers": 4, "attention_bias": False}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LLAMA | DEEPSEEK_V3),
    "deepseek_v3_one_group": (
        "DeepseekV3ForCausalLM",
        LLAMA
        | DEEPSEEK_V3
        | {"n_group": 1, "topk_group": 1, "num_attention_heads": 5, "num_key_value_heads": 5, "norm_topk_prob": False}
        | {"q_lora_rank": None, "tie_word_embeddings": True, "first_k_dense_replace": 0, "n_shared_experts": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
    ),
    "deepseek_v3_none_shared": (
        "DeepseekV3ForCausalLM",
        LLAMA
        | DEEPSEEK_V3
        | {"n_shared_experts": 0, "routed_scaling_factor": 1.0, "first_k_dense_replace": 3}
        | {"rope_parameters": DEEPSEEK_V3["rope_parameters"] | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LLAMA | DEEPSEEK_V2),
    "deepseek_v2_groups": (
        "DeepseekV2ForCausalLM",
        LLAMA
        | DEEPSEEK_V2
        | {"q_lora_rank": 20, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 4.0, "tie_word_embeddings": True, "num_attention_heads": 3}
        | {"num_key_value_heads": 3, "n_shared_experts": 1},
    ),
    "bert": ("MegatronBertForPreTraining", BERT),
    "bert_tanh": ("MegatronBertForPreTraining", BERT | {"hidden_act": "gelu_new", "layer_norm_eps": 0.1}),
    "bert_masked": ("MegatronBertForMaskedLM", BERT),
}


def new_model(transformers, name: str, config: dict[str, Any]):
    """A model with noise in every parameter: initial biases are 0 and norms 1, where a mistake in them would hide."""
    import torch

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**config))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + parameter.mean().round())  # 1 for the scales of norms
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def load(transformers, folder: Path, name: str, **options):
    return getattr(transformers, name).from_pretrained(folder, **options).eval()


def microbatch(
    family: str, *, batch: int = 3, seq: int = 18, seed: int = 0, is_padded: bool = False
) -> dict[str, np.ndarray]:
    """Tokens, of a BERT with token types and padding, of others with padding if `is_padded`."""
    generator = np.random.default_rng(seed)
    numbers = {"tokens": generator.integers(61, size=(batch, seq), dtype=np.int32)}
    if family == "bert":
        numbers["token_types"] = generator.integers(3, size=(batch, seq), dtype=np.int32)
    if family == "bert" or is_padded:
        length = generator.integers(seq // 2 + 1, seq + 1, size=(batch, 1))
        numbers["padding_mask"] = (np.arange(seq) < length).astype(np.int32)
    return numbers


def their_logits(model, numbers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits by name; those of positions that are padding are 0."""
    import torch

    names = {"tokens": "input_ids", "token_types": "token_type_ids", "padding_mask": "attention_mask"}
    with torch.no_grad():
        output = model(**{names[name]: torch.tensor(array, dtype=torch.long) for name, array in numbers.items()})
    if hasattr(output, "seq_relationship_logits"):
        found = {"masked_lm": output.prediction_logits, "sentence_order": output.seq_relationship_logits}
    else:
        found = {"masked_lm": output.logits}
    return _without_padding({name: logits.numpy() for name, logits in found.items()}, numbers)


def our_logits(workdir: Path, numbers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Of the last checkpoint of a run."""
    model = LanguageModel(model_config(read_config(str(workdir))))
    return logits_of(model, restore_canonical(workdir, model=model)[1], numbers)


def logits_of(model: LanguageModel, params: Any, numbers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = jax.jit(model.logits)(params, numbers)
    found = found if isinstance(found, dict) else {"masked_lm": found}
    return _without_padding({name: np.asarray(logits) for name, logits in found.items()}, numbers)


def read_model(folder: Path) -> tuple[LanguageModel, Any]:
    """Our model and its parameters, from a folder of transformers, without a run between."""
    theirs = configs.load_config(folder)
    config = model_config(configs.read_config(theirs, where=str(folder)))
    files = TensorFiles(folder)
    architecture = configs.architecture_of(theirs, where=str(folder))
    tensors = TensorMap(architecture, config, in_files=files.entries)
    tensors.check(files.entries, where=str(folder))
    return LanguageModel(config), tensors.read(files, where=str(folder))


def _without_padding(logits: dict[str, np.ndarray], numbers: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    if "padding_mask" in numbers:
        logits["masked_lm"] = np.where(numbers["padding_mask"][:, :, None] == 1, logits["masked_lm"], 0)
    return logits


def imported(folder: Path, workdir: Path) -> Path:
    import_model(str(folder), str(workdir))
    return workdir


def family_of(name: str) -> str:
    return "bert" if name.startswith("bert") else "gpt" if name.startswith("gpt") else "llama"
