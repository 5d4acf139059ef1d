"""One table of model families, and the way to add one from a file outside the package.

A family says what a config may say of its models and how they are built. What all else needs to know of one of its
models is that model's `Anatomy`: nothing outside a family's own file asks for its name or its class.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpipe.errors import ConfigError, closest, explain
from jaxpipe.models.language_model import ModelConfig

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
        name: a key of FAMILIES, or "FILE.py:NAME" for the Family that is called NAME in a Python file.

    Raises:
        ConfigError: there is none.

    Example:
        >>> family_named("bert").masked
        True
    """
    if name in FAMILIES:
        return FAMILIES[name]
    path, _, variable = name.rpartition(":")
    if not path.endswith(".py"):
        raise ConfigError(
            explain(
                f"model.family={name!r} is not known.{closest(name, list(FAMILIES))}",
                rule=f"field-choice: model.family is one of {', '.join(sorted(FAMILIES))}, or FILE.py:NAME",
                repair="set model.family to one of these",
            )
        )
    if not Path(path).is_file():
        raise ConfigError(
            explain(
                f"model.family={name!r}: there is no file {path}",
                rule="family-file: FILE.py:NAME is a Family that is called NAME in the Python file",
                picture=f"looked from {Path.cwd()}",
                repair="give the path of a file",
            )
        )
    found = getattr(_module(Path(path).resolve()), variable, None)
    if not isinstance(found, Family):
        raise ConfigError(
            explain(
                f"model.family={name!r}: {path} has no Family {variable!r}",
                rule="family-file: FILE.py:NAME is a Family that is called NAME in the Python file",
                picture=f"{variable} is {'not there' if found is None else f'of type {type(found).__name__}'}",
                repair=f"name a jaxpipe.models.Family of {path}",
            )
        )
    return found


@cache
def _module(path: Path) -> ModuleType:
    """The module in a file, read once, so that all who ask have the same classes."""
    name = f"jaxpipe_family_{path.stem}_{abs(hash(path))}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look for the names in annotations
    spec.loader.exec_module(module)
    return module
