"""Rules of `model` that no model config can check by itself: they need the family, the data or the devices."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxpipe.config.choice import check_choice
from jaxpipe.config.model_section import EXAMPLES, FIELDS, WORD_OR_NUMBER, number_of
from jaxpipe.errors import ConfigError
from jaxpipe.models.attention import check_cudnn
from jaxpipe.models.rotary import ROTARY_SCALINGS

LLAMA3_SCALING = ("rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_positions")


def check_family(config: ConfigDict) -> None:
    """Raises ConfigError unless `model` has the fields of its family: it was made for another."""
    family = config.model.family
    check_choice("model.family", family, tuple(FIELDS))
    different = set(config.model) ^ set(FIELDS[family])
    if different:
        raise ConfigError(
            f"model.family={family!r} in a config with the fields of another family\n"
            "  rule model-family: a family has fields of its own, so it is chosen where the config is made\n"
            f"      only one of the two has {', '.join(sorted(different))}\n"
            f"  repair: leave model.family as it was, or take a config of base_config(family={family!r}),"
            f" for example --config={EXAMPLES[family]}"
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
            f"model.num_positions={num_positions} with data.seq_len={seq_len}\n"
            "  rule positions: every token of a sequence has a row in the table of positions\n"
            f"      tokens {num_positions} .. {seq_len - 1} have none\n"
            f"  repair: set model.num_positions='auto', which is {seq_len}, or data.seq_len={num_positions}"
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
            f"{values} with model.rope_scaling_factor=1.0\n"
            "  rule rope-scaling: a factor of 1.0 scales nothing, so what it would scale has no effect\n"
            f"  repair: set model.rope_scaling_factor, 8.0 for Llama 3.1, or leave {' and '.join(changed)} out"
        )
    if model.rope_scaling == "linear" and len(changed) > 1:
        raise ConfigError(
            f"{values}\n"
            "  rule rope-scaling: 'linear' divides all frequencies, so what is a low or a high one has no effect\n"
            f"  repair: set model.rope_scaling='llama3', or leave {' and '.join(changed[1:])} out"
        )
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if low >= high:
        raise ConfigError(
            f"model.rope_low_frequency_factor={low} with model.rope_high_frequency_factor={high}\n"
            "  rule rope-frequencies: low frequencies turn less often than high ones\n"
            f"  repair: set model.rope_low_frequency_factor less than {high}, for example {high / 4}"
        )
