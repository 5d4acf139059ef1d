"""One table of model families, and the way to add one from a file outside the package.

A family says what a config may say of its models and how they are built. What all else needs to know of one of its
models is that model's `Anatomy`: nothing outside a family's own file asks for its name or its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxpipe.errors import ConfigError, closest, explain
from jaxpipe.models.language_model import ModelConfig
from jaxpipe.python_file import is_python_file, value_in_file

Fields = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Family:
    """A kind of model, as GPT.

    Attributes:
        name: that `model.family` of a config has.
        fields: of the section `model` of a config, with their defaults; a value has the type of its default. Every
            family has num_layers, vocab_size, attention, recompute and dtype.
        build: (fields, data.seq_len) -> the config of a model. It is given all fields but dtype, and None for a field
            of `words` that holds its word; it raises ConfigError where they do not fit together.
        words: of each field that is text because a word may stand in place of a number, the word: {"window": "none"}.
        choices: of a field that takes one of a few words that `build` does not check, these words.
        check: (fields, data.seq_len) -> raises ConfigError for fields that `build` takes, but that cannot be meant.
        masked: whether a model predicts tokens that are masked in the text; False: each next token.
        example: path of a config of the family, which errors name.

    Example:
        >>> FAMILIES["gpt"].fields["hidden"]
        128
    """

    name: str
    fields: Mapping[str, Any]
    build: Callable[[Fields, int], ModelConfig]
    words: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Fields, int], None] = lambda fields, seq_len: None
    masked: bool = False
    example: str = ""


FAMILIES: dict[str, Family] = {}


def register_family(family: Family) -> Family:
    """Adds `family` to FAMILIES, so that `model.family` may be its name; returns it.

    Raises:
        ConfigError: another family has this name.
    """
    if FAMILIES.setdefault(family.name, family) is not family:
        raise ConfigError(
            explain(
                f"a family {family.name!r} is there already",
                rule="family-name: every family has a name of its own",
                repair="give the new one another name",
            )
        )
    return family


def family_named(name: str) -> Family:
    """The family that `model.family` names.

    Args:
        name: a key of FAMILIES; or "FILE.py" for the Family in a Python file, "FILE.py:NAME" for one of several.

    Raises:
        ConfigError: there is none, or the file cannot be run.

    Example:
        >>> family_named("bert").masked
        True
    """
    if name in FAMILIES:
        return FAMILIES[name]
    if is_python_file(name):
        return value_in_file(name, Family, built_in=FAMILIES.values(), error=ConfigError)
    raise ConfigError(
        explain(
            f"model.family={name!r} is not known.{closest(name, list(FAMILIES))}",
            rule=f"field-choice: model.family is one of {', '.join(sorted(FAMILIES))}, or a Python file",
            repair="set model.family to one of these",
        )
    )
