"""One row of the mapping: a parameter of ours, the tensors of theirs that hold it, and the form between."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxpipe.huggingface.fields import Field, Only
from jaxpipe.huggingface.forms import SAME, Form


@dataclass(frozen=True)
class Row:
    """One parameter.

    Attributes:
        path: ours, as "layers.attention.norm.scale"; a model that has no such parameter skips the row.
        names: theirs, one for each tensor of the form, with {layer} for the layer's index.
        form: between the two.
        also: another name for the same numbers; where embeddings are tied, a file may have any of the names.
        also_tied: a name that holds the same numbers where embeddings are tied, and others where they are not.
    """

    path: str
    names: tuple[str, ...]
    form: Form = SAME
    also: tuple[str, ...] = ()
    also_tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Architecture:
    """One class of transformers.

    Attributes:
        name: as in "architectures" of config.json.
        model_type: as in config.json.
        family: ours.
        rows: its parameters.
        fields: of its config, that are ours under another name.
        only: of its config, that we follow for some values alone.
        read: (their config, where) -> what `fields` cannot say; may raise ConfigError.
        write: our config -> what `fields` cannot say, and what every such config has.
        longest: the field for the longest sequence, in tokens.
        buffers: patterns for names of tensors that are no parameters; they are left out.
        prefix: that some files leave out of their names.
    """

    name: str
    model_type: str
    family: str
    rows: tuple[Row, ...]
    fields: tuple[Field, ...]
    only: tuple[Only, ...]
    read: Callable[[Mapping[str, Any], str], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    longest: Field
    buffers: tuple[str, ...] = ()
    prefix: str = ""


def norm(path: str, name: str) -> tuple[Row, Row]:
    """The rows of a layer norm."""
    return Row(f"{path}.scale", (f"{name}.weight",)), Row(f"{path}.bias", (f"{name}.bias",))


def linear(path: str, name: str, form: Form) -> tuple[Row, Row]:
    """The rows of a product and its bias, the kernel in `form`."""
    return Row(f"{path}.kernel", (f"{name}.weight",), form), Row(f"{path}.bias", (f"{name}.bias",))
