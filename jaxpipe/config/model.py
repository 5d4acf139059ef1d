"""The section `model` of a config: its family decides its fields and builds the model from them.

Goes in: a config. Comes out: the config of its model, or an error of the checks that the model's own config cannot
make, since they need the data or the devices. Left to others: the fields with their meanings and defaults, which are in
the file of each family (`jaxpipe.models.gpt`, `bert`, `llama`, `mixture`).
"""

from __future__ import annotations

from typing import Any

from jaxpipe.config.base import RunConfig, example_of, legal_of, model_section
from jaxpipe.data.packing import DOCUMENTS
from jaxpipe.errors import ConfigError, check_choice
from jaxpipe.models import Family, ModelConfig, family_named
from jaxpipe.models.attention import check_cudnn
from jaxpipe.models.choices import NOTHING


def family_of(config: RunConfig) -> Family:
    """Family of a config's model.

    Raises:
        ConfigError: there is no family of this name.
    """
    return family_named(config.model.family)


def vocab_pipe(config: RunConfig) -> int:
    """Devices of `pipe` over which a config splits the vocabulary; 1: it does not."""
    return config.mesh.pipe if config.pipeline.vocab_over_pipe == "true" else 1


def model_config(config: RunConfig) -> ModelConfig:
    """Config of the model that `config` asks for.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """
    config = RunConfig.of(config)
    return family_of(config).build(_numbers(config), config.data.seq_len)


def kind_of_others(config: RunConfig) -> str:
    """What backward computes again of layers that `model.recompute` does not count by stage."""
    return NOTHING if ":" in config.model.recompute else config.model.recompute


def check_choices_of(config: RunConfig, **fields: Any) -> None:
    """Raises ConfigError for a model with these fields in place of the config's own that cannot be built."""
    family = family_of(config)
    if not family.is_given:
        family.build(_numbers(config) | fields, config.data.seq_len)


def number_of(config: RunConfig, field: str) -> int | None:
    """Number in `model.field`, of the family's `words`, or None where its word stands.

    Raises:
        ConfigError: the field holds something else.
    """
    value = getattr(config.model, field)
    word = family_of(config).words[field]
    if value == word or isinstance(value, int):
        return None if value == word else value
    most = legal_of(f"model.{field}").most_of(0)
    assert most is not None  # every whole number has one
    # Python reads no number of thousands of digits.
    if not (value.isascii() and value.isdecimal() and len(value) < 20 and 1 <= int(value) <= most):
        raise ConfigError(
            f"model.{field}={value!r} is neither {word!r} nor such a number",
            rule=f"word-or-number: {word!r}, or a whole number of 1 to {most}, written as text",
            repair=f"set model.{field}={word!r}, its default, or for example model.{field}='128'",
        )
    return int(value)


def check_family(config: RunConfig) -> None:
    """Raises ConfigError unless `model` has the fields of its family, not those of another."""
    name = config.model.family
    family = family_of(config)
    if family.is_given:
        model_config(config)
    different = set(vars(config.model)) ^ set(model_section(name))
    if different:
        raise ConfigError(
            f"model.family={name!r} in a config with the fields of another family",
            rule="model-family: a family has fields of its own, so it is chosen where the config is made",
            picture=f"only one of the two has {', '.join(sorted(different))}",
            repair=f"leave model.family as it was, or take a config of base_config(family={name!r})"
            + example_of(family),
        )


def check_words_and_numbers(config: RunConfig) -> None:
    """Raises ConfigError for a text in `model` that is neither its field's word nor a number, or is no choice of it."""
    for field in family_of(config).words:
        number_of(config, field)
    words = {**vars(config.model), "recompute": kind_of_others(config)}
    for field, known in family_of(config).choices.items():
        check_choice(f"model.{field}", words[field], known)


def check_fields(config: RunConfig) -> None:
    """Raises ConfigError for fields from which a model can be built, but that contradict each other."""
    family_of(config).check(_numbers(config), config.data.seq_len)


def check_attention_kernel(config: RunConfig) -> None:
    """Raises ConfigError for a model that the kernels of cuDNN do not cover; "auto" may find a GPU."""
    if getattr(config.model, "attention", None) != "cudnn":
        return
    try:
        anatomy = model_config(config).anatomy
    except ConfigError:
        return  # `check` reports it by itself
    check_cudnn(
        platform="cpu" if config.mesh.platform == "cpu" else "gpu",
        dtype=config.model.dtype,
        head_dim=anatomy.head_size,
        attention_dropout=anatomy.attention_dropout,
        packs_documents=config.data.packing == DOCUMENTS,
    )


def _numbers(config: RunConfig) -> dict[str, Any]:
    """Fields of `model` that decide the model, with numbers in place of words."""
    fields = {**vars(config.model), "recompute": kind_of_others(config)}
    del fields["family"], fields["dtype"]
    return fields | {name: number_of(config, name) for name in family_of(config).words}
