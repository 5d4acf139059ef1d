"""The fields of `model`: a family decides which there are, with their meanings and defaults.

Goes in: a config. Comes out: the config of its model. Left to others: whether the values are legal
(`model_checks`, and the model's own config).
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxpipe.errors import ConfigError, check_choice, explain
from jaxpipe.models import BertConfig, GPTConfig, LlamaConfig, ModelConfig
from jaxpipe.models.attention import check_cudnn
from jaxpipe.models.rotary import ROTARY_SCALINGS, RotaryScaling

WORDS = {
    "vocab_size": 256,  # tokens are 0 .. vocab_size - 1; bytes are 256
    "vocab_multiple": 128,  # the tables of words have a multiple of so many rows; those beyond the words do nothing
}

CHOICES = {
    "attention": "xla",  # how a layer attends: a key of jaxpipe.models.attention.ATTENTION
    "recompute": "none",  # what backward computes again: "none", "attention", "full"
    "dtype": "float32",  # of compute and activations: "float32", "bfloat16"; the state is float32
}

LAYER_NORM_SIZES = {
    "num_layers": 8,  # transformer layers
    "hidden": 128,  # size of the residual stream
    "num_heads": 2,  # divides hidden
    "feed_forward": "auto",  # size between the products of the feed forward; "auto": 4 hidden
    **WORDS,
    "num_positions": "auto",  # learned positions, data.seq_len or more; "auto": data.seq_len
    "norm_epsilon": 1e-5,  # added to the variance in the norms
    "tie_embeddings": True,  # the logits use the token table
}

DROPOUTS = {
    "embedding_dropout": 0.0,  # the part, in [0, 1), that training drops of the embeddings,
    "attention_dropout": 0.0,  # of the attention probabilities,
    "hidden_dropout": 0.0,  # and of what a layer adds to the residual stream
}

GPT = {
    "family": "gpt",
    **LAYER_NORM_SIZES,
    "activation": "gelu_tanh",  # between the products of the feed forward: "gelu_tanh", "gelu" (erf), "relu"
    **DROPOUTS,
    **CHOICES,
}

BERT = {
    "family": "bert",
    **LAYER_NORM_SIZES,
    "vocab_size": 260,  # the bytes, and the four words that masked sequences need besides
    "activation": "gelu",  # between the products of the feed forward: "gelu_tanh", "gelu" (erf), "relu"
    "num_token_types": 2,  # the segments of a sequence have types of their own
    "sentence_order": True,  # it also learns in which order the two segments of a sequence stood
    **DROPOUTS,
    **CHOICES,
}

LLAMA = {
    "family": "llama",
    "num_layers": 8,  # transformer layers
    "hidden": 128,  # size of the residual stream
    "num_heads": 2,  # query heads
    "num_kv_heads": 2,  # key and value heads; divides num_heads
    "head_size": "auto",  # of each head, even; "auto": hidden / num_heads
    "feed_forward": 384,  # size between the products of the feed forward
    **WORDS,
    "tie_embeddings": False,  # True: the logits use the token table
    "query_key_value_bias": False,  # True, as Qwen2: the products to queries, keys and values have biases
    "output_bias": False,  # True: the product of attention back to the stream has one
    "feed_forward_bias": False,  # True: the products of the feed forward have biases
    "sliding_window": "none",  # how many keys a query sees, the last ones, itself included, as Mistral; "none": all
    "rope_theta": 10000.0,  # base of the rotary frequencies
    "rope_scaling": "llama3",  # which frequencies are divided: "llama3", the low ones, as Llama 3.1; "linear", all
    "rope_scaling_factor": 1.0,  # what they are divided by; 1.0: none are, and rope_scaling and the next
    "rope_low_frequency_factor": 1.0,  # three have no effect: low ones turn at most so often in these positions,
    "rope_high_frequency_factor": 4.0,  # high ones, which stay as they are, at least so often
    "rope_original_positions": 8192,  # tokens of a sequence before they were stretched
    "norm_epsilon": 1e-5,  # added to the mean square in the norms
    **CHOICES,
}

FIELDS: dict[str, dict[str, Any]] = {"gpt": GPT, "bert": BERT, "llama": LLAMA}

EXAMPLES = {"gpt": "configs/quickstart.py", "bert": "configs/bert_base.py", "llama": "configs/llama_7b.py"}

# Fields that are text because a word may stand in place of a number.
WORD_OR_NUMBER = {"feed_forward": "auto", "num_positions": "auto", "head_size": "auto", "sliding_window": "none"}


def model_config(config: ConfigDict) -> ModelConfig:
    """The model of a config.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """
    fields = config.model.to_dict()
    family, _ = fields.pop("family"), fields.pop("dtype")
    fields |= {name: number_of(config, name) for name in WORD_OR_NUMBER if name in fields}
    if family == "llama":
        return LlamaConfig(**_with_scaling(fields))
    fields["num_positions"] = fields["num_positions"] or config.data.seq_len
    return {"gpt": GPTConfig, "bert": BertConfig}[family](**fields)


def number_of(config: ConfigDict, field: str) -> int | None:
    """The number that `model.field`, of WORD_OR_NUMBER, holds, or None where its word stands.

    Raises:
        ConfigError: it holds something else.
    """
    value, word = config.model[field], WORD_OR_NUMBER[field]
    if value == word or isinstance(value, int):
        return None if value == word else value
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(
            explain(
                f"model.{field}={value!r} is neither {word!r} nor a number",
                rule=f"word-or-number: {word!r}, or a whole number of 1 or more, written as text",
                repair=f"set model.{field}={word!r}, its default, or for example model.{field}='128'",
            )
        )
    return int(value)


def _with_scaling(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a LlamaConfig: those of `rope_...` as one."""
    scaling = RotaryScaling(
        kind=fields.pop("rope_scaling"),
        factor=fields.pop("rope_scaling_factor"),
        low_freq_factor=fields.pop("rope_low_frequency_factor"),
        high_freq_factor=fields.pop("rope_high_frequency_factor"),
        original_max_position=fields.pop("rope_original_positions"),
    )
    return fields | {"rope_scaling": None if scaling.factor == 1.0 else scaling}


# ---- Rules that no model config can check by itself: they need the family, the data or the devices.

LLAMA3_SCALING = ("rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_positions")


def check_family(config: ConfigDict) -> None:
    """Raises ConfigError unless `model` has the fields of its family: it was made for another."""
    family = config.model.family
    check_choice("model.family", family, tuple(FIELDS))
    different = set(config.model) ^ set(FIELDS[family])
    if different:
        raise ConfigError(
            explain(
                f"model.family={family!r} in a config with the fields of another family",
                rule="model-family: a family has fields of its own, so it is chosen where the config is made",
                picture=f"only one of the two has {', '.join(sorted(different))}",
                repair=(
                    "leave model.family as it was, or take a config of base_config(family="
                    f"{family!r}), for example --config={EXAMPLES[family]}"
                ),
            )
        )


def check_words_and_numbers(config: ConfigDict) -> None:
    """Raises ConfigError for a text in `model` that is neither its word nor a number."""
    for field in WORD_OR_NUMBER:
        if isinstance(config.model.get(field), str):
            number_of(config, field)
    if config.model.family == "llama":
        check_choice("model.rope_scaling", config.model.rope_scaling, ROTARY_SCALINGS)


def check_positions(config: ConfigDict) -> None:
    """Raises ConfigError for sequences that are longer than the table of positions."""
    if "num_positions" not in config.model:
        return
    num_positions, seq_len = number_of(config, "num_positions"), config.data.seq_len
    if num_positions is not None and num_positions < seq_len:
        raise ConfigError(
            explain(
                f"model.num_positions={num_positions} with data.seq_len={seq_len}",
                rule="positions: every token of a sequence has a row in the table of positions",
                picture=f"tokens {num_positions} .. {seq_len - 1} have none",
                repair=f"set model.num_positions='auto', which is {seq_len}, or data.seq_len={num_positions}",
            )
        )


def check_attention_kernel(config: ConfigDict) -> None:
    """Raises ConfigError for a model that the kernels of cuDNN do not cover; "auto" may find a GPU."""
    model = config.model
    if model.attention == "cudnn":
        check_cudnn(
            platform="cpu" if config.mesh.platform == "cpu" else "gpu",
            dtype=model.dtype,
            head_dim=("head_size" in model and number_of(config, "head_size")) or model.hidden // model.num_heads,
            attention_dropout=model.get("attention_dropout", 0.0),
        )


def check_rope_scaling(config: ConfigDict) -> None:
    """Raises ConfigError for a scaling of the rotary frequencies that does nothing or has no range between."""
    model = config.model
    if model.family != "llama":
        return
    changed = [name for name in ("rope_scaling", *LLAMA3_SCALING) if model[name] != FIELDS["llama"][name]]
    values = ", ".join(f"model.{name}={model[name]!r}" for name in changed)
    if changed and model.rope_scaling_factor == 1.0:
        raise ConfigError(
            explain(
                f"{values} with model.rope_scaling_factor=1.0",
                rule="rope-scaling: a factor of 1.0 scales nothing, so what it would scale has no effect",
                repair=f"set model.rope_scaling_factor, 8.0 for Llama 3.1, or leave {' and '.join(changed)} out",
            )
        )
    if model.rope_scaling == "linear" and len(changed) > 1:
        raise ConfigError(
            explain(
                f"{values}",
                rule="rope-scaling: 'linear' divides all frequencies, so what is a low or a high one has no effect",
                repair=f"set model.rope_scaling='llama3', or leave {' and '.join(changed[1:])} out",
            )
        )
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if low >= high:
        raise ConfigError(
            explain(
                f"model.rope_low_frequency_factor={low} with model.rope_high_frequency_factor={high}",
                rule="rope-frequencies: low frequencies turn less often than high ones",
                repair=f"set model.rope_low_frequency_factor less than {high}, for example {high / 4}",
            )
        )
