"""The fields of `model`: a family decides which there are, with their meanings and defaults.

Goes in: a config. Comes out: the config of its model. Left to others: whether the values are legal
(`model_checks`, and the model's own config).
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxpipe.models import GPTConfig, LlamaConfig
from jaxpipe.models.rotary import RotaryScaling

CHOICES = {
    "attention": "xla",  # how a layer attends: a key of jaxpipe.models.attention.ATTENTION
    "recompute": "none",  # what backward computes again: "none", "attention", "full"
    "dtype": "float32",  # of compute and activations: "float32", "bfloat16"; the state is float32
}

GPT = {
    "family": "gpt",
    "num_layers": 8,  # transformer layers
    "hidden": 128,  # size of the residual stream
    "num_heads": 2,  # divides hidden
    "vocab_size": 256,  # at least 256: a token is a byte
    "tie_embeddings": True,  # the logits use the token table
    "embedding_dropout": 0.0,  # the part, in [0, 1), that training drops of the embeddings,
    "attention_dropout": 0.0,  # of the attention probabilities,
    "hidden_dropout": 0.0,  # and of what a layer adds to the residual stream
    **CHOICES,
}

LLAMA = {
    "family": "llama",
    "num_layers": 8,  # transformer layers
    "hidden": 128,  # size of the residual stream
    "num_heads": 2,  # query heads; divides hidden
    "num_kv_heads": 2,  # key and value heads; divides num_heads
    "feed_forward": 384,  # size between the products of the feed forward
    "vocab_size": 256,  # at least 256: a token is a byte
    "tie_embeddings": False,  # True: the logits use the token table
    "rope_theta": 10000.0,  # base of the rotary frequencies
    "rope_scaling_factor": 1.0,  # low frequencies are divided by it, as in Llama 3.1; 1.0: none are, and the next
    "rope_low_frequency_factor": 1.0,  # three have no effect: low ones turn at most so often in these positions,
    "rope_high_frequency_factor": 4.0,  # high ones, which stay as they are, at least so often
    "rope_original_positions": 8192,  # tokens of a sequence before they were stretched
    "norm_epsilon": 1e-5,  # added to the mean square in the norms
    **CHOICES,
}

FIELDS: dict[str, dict[str, Any]] = {"gpt": GPT, "llama": LLAMA}

EXAMPLES = {"gpt": "configs/quickstart.py", "llama": "configs/llama_7b.py"}


def model_config(config: ConfigDict) -> GPTConfig | LlamaConfig:
    """The model of a config; a GPT gets as many positions as a sequence has tokens.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """
    fields = config.model.to_dict()
    family, _ = fields.pop("family"), fields.pop("dtype")
    if family == "gpt":
        return GPTConfig(**fields, seq_len=config.data.seq_len)
    scaling = RotaryScaling(
        factor=fields.pop("rope_scaling_factor"),
        low_freq_factor=fields.pop("rope_low_frequency_factor"),
        high_freq_factor=fields.pop("rope_high_frequency_factor"),
        original_max_position=fields.pop("rope_original_positions"),
    )
    return LlamaConfig(**fields, rope_scaling=None if scaling.factor == 1.0 else scaling)
