"""Rules of `model` that no model config can check by itself: they need the family, the data or the devices."""

from __future__ import annotations

from ml_collections import ConfigDict

from jaxpipe.config.choice import check_choice
from jaxpipe.config.model_section import EXAMPLES, FIELDS
from jaxpipe.data import VOCAB_SIZE
from jaxpipe.errors import ConfigError
from jaxpipe.models.attention import check_cudnn

ROPE_SCALING = ("rope_low_frequency_factor", "rope_high_frequency_factor", "rope_original_positions")


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


def check_vocabulary(config: ConfigDict) -> None:
    """Raises ConfigError for a vocabulary that lacks tokens of the data."""
    if config.model.vocab_size < VOCAB_SIZE:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is less than the tokens there are\n"
            f"  rule vocabulary: a token is a byte, 0 .. {VOCAB_SIZE - 1}\n"
            f"  repair: set model.vocab_size={VOCAB_SIZE}"
        )


def check_attention_kernel(config: ConfigDict) -> None:
    """Raises ConfigError for a model that the kernels of cuDNN do not cover; "auto" may find a GPU."""
    model = config.model
    if model.attention == "cudnn":
        check_cudnn(
            platform="cpu" if config.mesh.platform == "cpu" else "gpu",
            dtype=model.dtype,
            head_dim=model.hidden // model.num_heads,
            attention_dropout=model.attention_dropout if model.family == "gpt" else 0.0,
        )


def check_rope_scaling(config: ConfigDict) -> None:
    """Raises ConfigError for a scaling of the rotary frequencies that does nothing or has no range between."""
    model = config.model
    if model.family != "llama":
        return
    changed = [name for name in ROPE_SCALING if model[name] != FIELDS["llama"][name]]
    if changed and model.rope_scaling_factor == 1.0:
        raise ConfigError(
            f"{', '.join(f'model.{name}={model[name]}' for name in changed)} with model.rope_scaling_factor=1.0\n"
            "  rule rope-scaling: a factor of 1.0 scales nothing, so what it would scale has no effect\n"
            f"  repair: set model.rope_scaling_factor, 8.0 for Llama 3.1, or leave {' and '.join(changed)} out"
        )
    low, high = model.rope_low_frequency_factor, model.rope_high_frequency_factor
    if low >= high:
        raise ConfigError(
            f"model.rope_low_frequency_factor={low} with model.rope_high_frequency_factor={high}\n"
            "  rule rope-frequencies: low frequencies turn less often than high ones\n"
            f"  repair: set model.rope_low_frequency_factor less than {high}, for example {high / 4}"
        )
