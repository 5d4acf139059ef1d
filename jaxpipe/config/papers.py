"""The common settings of all model sizes of a paper; a file in `configs/` adds size, batch and mesh.

Steps, warm-up and text are the run's own, in `train`, `optimizer` and `data`: tokens are bytes unless
`data.tokenizer` names others, and the vocabulary is as long as the paper's, so that the work is the same.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxpipe.config.base import base_config


def gpt3() -> ConfigDict:
    """GPT-3's sequences, optimizer and, as Megatron-LM trains it, vocabulary and dropout.

    Source: Brown et al. 2020 (arXiv 2005.14165), section 2.1 and appendix B; Megatron-LM pads 50257 words to a
    multiple of 128 for each of 8 devices of `tensor`, and drops 0.1 by default.
    """
    config = base_config("gpt")
    config.model.vocab_size = 51200
    _drop_tenths(config)
    config.data.seq_len = 2048
    return _large(config)


def bert() -> ConfigDict:
    """BERT's vocabulary, sequences, dropout and optimizer.

    Source: Devlin et al. 2019 (arXiv 1810.04805), appendix A.2; uncased WordPiece of 30522 words, which the tables
    of words round up to a multiple of 128, as Megatron-LM's.
    """
    config = base_config("bert")
    config.model.vocab_size = 30522
    _drop_tenths(config)
    config.data.seq_len = 512
    config.optimizer.beta2 = 0.999
    config.optimizer.weight_decay = 0.01
    return _large(config)


def llama() -> ConfigDict:
    """The first LLaMA's vocabulary, sequences, norms and batch of 4 million tokens.

    Source: Touvron et al. 2023 (arXiv 2302.13971), section 2; norms as in Meta's params.json.
    """
    config = base_config("llama")
    config.model.vocab_size = 32000
    config.model.norm_epsilon = 1e-6
    config.data.batch_size = 2048
    config.data.seq_len = 2048
    return _large(config)


def llama3() -> ConfigDict:
    """Llama 3's vocabulary, sequences, key-value heads and rotary base; the first LLaMA's batch of 4 million tokens.

    Source: Grattafiori et al. 2024 (arXiv 2407.21783), table 3; the vocabulary with its special tokens as in
    Meta's params.json.
    """
    config = base_config("llama")
    config.model.num_kv_heads = 8
    config.model.vocab_size = 128256
    config.model.rope_theta = 500000.0
    config.data.batch_size = 512
    config.data.seq_len = 8192
    return _large(config)


def llama31() -> ConfigDict:
    """Llama 3's with sequences of 131072 tokens and low frequencies divided by 8; the same tokens a batch.

    Source: Grattafiori et al. 2024 (arXiv 2407.21783), section 3.4.2; the scaling as in Meta's config.json of
    Llama 3.1, for which 8192 positions are the original ones.
    """
    config = llama3()
    config.model.rope_scaling_factor = 8.0
    config.data.batch_size = 32
    config.data.seq_len = 131072
    return config


def mixtral() -> ConfigDict:
    """Mixtral's vocabulary, key-value heads, rotary base and experts; a batch of 4 million tokens.

    Source: Jiang et al. 2024 (arXiv 2401.04088), table 1; rotary base and norms as in its config.json.
    """
    config = base_config("mixtral")
    config.model.num_kv_heads = 8
    config.model.vocab_size = 32000
    config.model.rope_theta = 1e6
    config.data.batch_size = 1024
    config.data.seq_len = 4096
    return _large(config)


def qwen3_moe() -> ConfigDict:
    """The vocabulary, heads, rotary base and experts of Qwen3's mixtures; a batch of 4 million tokens.

    Source: Qwen3 technical report 2025 (arXiv 2505.09388), table 2; widths and the loss of routers as in config.json.
    """
    config = base_config("qwen3_moe")
    config.model.num_kv_heads = 4
    config.model.head_size = "128"
    config.model.num_experts = 128
    config.model.experts_per_token = 8
    config.model.vocab_size = 151936
    config.model.rope_theta = 1e6
    config.model.norm_epsilon = 1e-6
    config.data.batch_size = 1024
    config.data.seq_len = 4096
    return _large(config)


def gpt_oss() -> ConfigDict:
    """What both sizes of gpt-oss share: width, heads, experts of a token and YaRN; a batch of 4 million tokens.

    Source: gpt-oss model card 2025 (arXiv 2508.10925), section 2; the rest as in its config.json.
    """
    config = base_config("gpt_oss")
    config.model.hidden = 2880
    config.model.num_heads = 64
    config.model.num_kv_heads = 8
    config.model.head_size = "64"
    config.model.feed_forward = 2880
    config.model.experts_per_token = 4
    config.model.vocab_size = 201088
    config.model.rope_theta = 150000.0
    config.model.rope_scaling = "yarn"
    config.model.rope_scaling_factor = 32.0
    config.model.rope_original_positions = 4096
    config.model.rope_truncate = False
    config.data.batch_size = 1024
    config.data.seq_len = 4096
    return _large(config)


def deepseek() -> ConfigDict:
    """What DeepSeek-V2-Lite and -V3 share: sizes of heads and latents, and YaRN; sequences of 4096 tokens.

    Source: DeepSeek-V2 2024 (arXiv 2405.04434), section 3.1.2; the rest as in their config.json.
    """
    config = base_config("deepseek_v3")
    config.model.plain_size = 128
    config.model.rotary_size = 64
    config.model.value_size = 128
    config.model.latent_size = 512
    config.model.norm_epsilon = 1e-6
    config.model.rope_scaling = "yarn"
    config.model.rope_scaling_factor = 40.0
    config.model.rope_original_positions = 4096
    config.model.rope_attention_factor = 1.0
    config.data.seq_len = 4096
    return _large(config)


def _drop_tenths(config: ConfigDict) -> None:
    config.model.embedding_dropout = config.model.attention_dropout = config.model.hidden_dropout = 0.1


def _large(config: ConfigDict) -> ConfigDict:
    """Saves memory for large models: bfloat16, and no scores of whole sequences kept for backward."""
    config.model.attention = "chunked"  # runs everywhere; "cudnn" is for NVIDIA GPUs and takes no attention_dropout
    config.model.dtype = "bfloat16"
    return config
