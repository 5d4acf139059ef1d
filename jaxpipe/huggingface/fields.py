"""The fields of a config.json as data: which of ours is which of theirs, and which of theirs we cannot follow.

Goes in: a config.json as a dict. Comes out: values for the config of our model, and back. Left to others:
which fields there are (one file a family), rotary positions (`rope`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.errors import ConfigError


@dataclass(frozen=True)
class Field:
    """One of our fields that is one of theirs.

    Attributes:
        ours: of the model's config.
        theirs: of config.json.
        default: what transformers takes where config.json has none.
        words: theirs to ours, where both are words; of several with one meaning the first is written.
        alias: another name that transformers reads for `theirs`.
    """

    ours: str
    theirs: str
    default: Any
    words: Mapping[str, str] | None = None
    alias: str = ""


@dataclass(frozen=True)
class Only:
    """One of their fields that changes the numbers, and the values of it that we can follow.

    Attributes:
        theirs: of config.json; one that is not there has the first value.
        values: that we can follow.
    """

    theirs: str
    values: tuple[Any, ...]


# What transformers' base class or any model's code reads.
ONLY = (
    Only("add_cross_attention", (False,)),
    Only("auto_map", (None, {})),
    Only("is_causal", (True,)),
    Only("is_decoder", (False,)),
    Only("is_encoder_decoder", (False,)),
    Only("pruned_heads", (None, {})),
    Only("quantization_config", (None,)),
    Only("torchscript", (False,)),
)

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
}


def read_fields(theirs: Mapping[str, Any], fields: Sequence[Field], *, where: str) -> dict[str, Any]:
    """Our values of `fields`.

    Raises:
        ConfigError: a word that we do not have.
    """
    found = {}
    for field in fields:
        value = theirs.get(field.theirs, theirs.get(field.alias, field.default))
        if field.words is not None:
            if value not in field.words:
                raise refusal(where, field.theirs, value, tuple(field.words))
            value = field.words[value]
        found[field.ours] = value
    return found


def write_fields(ours: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, Any]:
    """Their values of `fields`."""

    def theirs(field: Field) -> Any:
        value = ours[field.ours]
        return value if field.words is None else next(word for word, own in field.words.items() if own == value)

    return {field.theirs: theirs(field) for field in fields}


def check_only(theirs: Mapping[str, Any], only: Sequence[Only], *, where: str) -> None:
    """Raises ConfigError for a field of theirs with a value that we cannot follow."""
    for one in (*only, *ONLY):
        value = theirs.get(one.theirs, one.values[0])
        if value not in one.values:
            raise refusal(where, one.theirs, value, one.values)


def refusal(where: str, theirs: str, value: Any, legal: Sequence[Any]) -> ConfigError:
    """The error for a field of theirs that would change the numbers."""
    return ConfigError(
        f"{where}: {theirs}={value!r} changes the numbers, and jaxpipe has nothing like it\n"
        "  rule huggingface-field: every field that the model's numbers depend on has a counterpart\n"
        f"      {theirs} may be {', '.join(map(json.dumps, legal))}\n"
        "  repair: convert a model that was trained so; to change the field is to make another model"
    )
