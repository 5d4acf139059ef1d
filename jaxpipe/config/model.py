"""The section `model` of a config: its family decides its fields and builds the model from them.

Goes in: a config. Comes out: the config of its model, or an error of the checks that the model's own config cannot
make, since they need the data or the devices. Left to others: the fields with their meanings and defaults, which are in
the file of each family (`jaxpipe.models.gpt`, `bert`, `llama`, `mixture`).
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from jaxpipe.cluster.axes import AXES, MeshSizes
from jaxpipe.config.bounds import AT_MOST, INT32
from jaxpipe.data.packing import DOCUMENTS
from jaxpipe.errors import ConfigError, check_choice
from jaxpipe.models import Family, ModelConfig, family_named
from jaxpipe.models.attention import check_cudnn


def family_of(config: ConfigDict) -> Family:
    """Family of a config's model.

    Raises:
        ConfigError: there is no family of this name.
    """
    return family_named(config.model.family)


def vocab_pipe(config: ConfigDict) -> int:
    """Devices of `pipe` over which a config splits the vocabulary; 1: it does not."""
    return config.mesh.pipe if config.pipeline.vocab_over_pipe == "true" else 1


def model_section(name: str) -> dict[str, Any]:
    """All fields of `model` of a family, with their defaults."""
    return {"family": name, **family_named(name).fields}


def model_config(config: ConfigDict) -> ModelConfig:
    """Config of the model that `config` asks for.

    Raises:
        ConfigError: the sizes and choices do not fit together.
    """
    return family_of(config).build(_numbers(config), config.data.get("seq_len", 0))


def number_of(config: ConfigDict, field: str) -> int | None:
    """Number in `model.field`, of the family's `words`, or None where its word stands.

    Raises:
        ConfigError: the field holds something else.
    """
    value = config.model[field]
    word = family_of(config).words[field]
    if value == word or isinstance(value, int):
        return None if value == word else value
    most = AT_MOST.get(f"model.{field}", INT32)
    # Python reads no number of thousands of digits.
    if not (value.isascii() and value.isdecimal() and len(value) < 20 and 1 <= int(value) <= most):
        raise ConfigError(
            f"model.{field}={value!r} is neither {word!r} nor such a number",
            rule=f"word-or-number: {word!r}, or a whole number of 1 to {most}, written as text",
            repair=f"set model.{field}={word!r}, its default, or for example model.{field}='128'",
        )
    return int(value)


def mesh_axes(config: ConfigDict) -> dict[str, int]:
    """The sizes of the config's mesh by axis."""
    return {name: config.mesh[name] for name in AXES}


def mesh_sizes(config: ConfigDict) -> MeshSizes:
    """The sizes of the config's mesh."""
    return MeshSizes(**mesh_axes(config))


def microbatch_size(config: ConfigDict) -> int:
    """Sequences of a microbatch on one device, of a checked config."""
    return config.data.batch_size // (mesh_sizes(config).num_batch_parts * config.pipeline.num_microbatches)


def check_family(config: ConfigDict) -> None:
    """Raises ConfigError unless `model` has the fields of its family, not those of another."""
    name = config.model.family
    family = family_of(config)
    if family.is_given:
        model_config(config)
    different = set(config.model) ^ set(model_section(name))
    if different:
        raise ConfigError(
            f"model.family={name!r} in a config with the fields of another family",
            rule="model-family: a family has fields of its own, so it is chosen where the config is made",
            picture=f"only one of the two has {', '.join(sorted(different))}",
            repair=f"leave model.family as it was, or take a config of base_config(family={name!r})"
            + example_of(family),
        )


def example_of(family: Family) -> str:
    """Text for the end of a repair: where a config of `family` stands."""
    return f", for example --config={family.example}" if family.example else ""


def check_words_and_numbers(config: ConfigDict) -> None:
    """Raises ConfigError for a text in `model` that is neither its field's word nor a number, or is no choice of it."""
    for field in family_of(config).words:
        number_of(config, field)
    for field, known in family_of(config).choices.items():
        check_choice(f"model.{field}", config.model[field], known)


def check_fields(config: ConfigDict) -> None:
    """Raises ConfigError for fields from which a model can be built, but that contradict each other."""
    family_of(config).check(_numbers(config), config.data.seq_len)


def check_attention_kernel(config: ConfigDict) -> None:
    """Raises ConfigError for a model that the kernels of cuDNN do not cover; "auto" may find a GPU."""
    if config.model.get("attention") != "cudnn":
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
        packs_documents=config.data.get("packing") == DOCUMENTS,
    )


def _numbers(config: ConfigDict) -> dict[str, Any]:
    """Fields of `model` that decide the model, with numbers in place of words."""
    fields = config.model.to_dict()
    del fields["family"], fields["dtype"]
    return fields | {name: number_of(config, name) for name in family_of(config).words}
