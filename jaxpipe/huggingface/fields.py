"""A table of config.json fields: the matching field of jaxpipe's config, and the values that jaxpipe supports.

Goes in: a config.json as a dict. Comes out: values for the config of our model, and back. Left to others: which fields
there are (one file a family).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.errors import ConfigError, explain


@dataclass(frozen=True)
class Field:
    """A field of our model's config that is one of theirs.

    Attributes:
        ours: name in our model's config.
        theirs: name in config.json.
        default: the value that transformers uses if config.json does not have the field.
        choices: their values to ours, if these are names; of several names with one meaning, the first is written.
        alias: another name that transformers reads for `theirs`.
    """

    ours: str
    theirs: str
    default: Any
    choices: Mapping[str, str] | None = None
    alias: str = ""


@dataclass(frozen=True)
class Supported:
    """A field of theirs that changes what the model computes, and the values of it that jaxpipe supports.

    Attributes:
        theirs: name in config.json; a missing field has the first value.
        values: the supported values.
    """

    theirs: str
    values: tuple[Any, ...]


# Fields that transformers' base class or the code of every model reads.
SUPPORTED = (
    Supported("add_cross_attention", (False,)),
    Supported("auto_map", (None, {})),
    Supported("is_causal", (True,)),
    Supported("is_decoder", (False,)),
    Supported("is_encoder_decoder", (False,)),
    Supported("pruned_heads", (None, {})),
    Supported("quantization_config", (None,)),
    Supported("torchscript", (False,)),
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
    """Returns our values of `fields`.

    Raises:
        ConfigError: a field has a value that jaxpipe does not support.
    """
    found = {}
    for field in fields:
        value = theirs.get(field.theirs, theirs.get(field.alias, field.default))
        if field.choices is not None:
            if value not in field.choices:
                raise not_supported(where, field.theirs, value, tuple(field.choices))
            value = field.choices[value]
        found[field.ours] = value
    return found


def write_fields(ours: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, Any]:
    """Returns their values of `fields`."""

    def theirs(field: Field) -> Any:
        value = ours[field.ours]
        return value if field.choices is None else next(name for name, own in field.choices.items() if own == value)

    return {field.theirs: theirs(field) for field in fields}


def check_supported(theirs: Mapping[str, Any], supported: Sequence[Supported], *, where: str) -> None:
    """Raises ConfigError if a field of theirs has a value that jaxpipe does not support."""
    for field in (*supported, *SUPPORTED):
        value = theirs.get(field.theirs, field.values[0])
        if value not in field.values:
            raise not_supported(where, field.theirs, value, field.values)


def not_supported(where: str, theirs: str, value: Any, legal: Sequence[Any]) -> ConfigError:
    """The error for a field of theirs whose value jaxpipe does not support."""
    return ConfigError(
        explain(
            f"{where}: {theirs}={value!r} changes what the model computes, and jaxpipe does not support it",
            rule="huggingface-field: every field that the model's numbers depend on has a counterpart",
            picture=f"{theirs} may be {', '.join(map(json.dumps, legal))}",
            repair="convert a model trained with a supported value; editing the field would make another model",
        )
    )
