"""The table of one class of transformers: which tensors hold which parameter, in which layout, and its config fields.

A `Parameter` names the tensors of one of our parameters and the `Transform` between both layouts; a `Field` is a field
of config.json and the matching one of jaxpipe's config, and `Supported` the values of fields that jaxpipe knows;
an `Architecture` has all of a class. Transforms only move numbers, so both ways are exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.models import Anatomy


@dataclass(frozen=True)
class Field:
    """A field of our model's config that is one of theirs, or that their class fixes."""

    ours: str  # name in our model's config
    theirs: str  # name in config.json; empty for a field that their class fixes
    default: Any  # the value that transformers uses if config.json does not have the field
    # Their values to ours, if these are names; of several names with one meaning, the first is written.
    choices: Mapping[str, str] | None = None
    alias: str = ""  # another name that transformers reads for `theirs`


Supported = Mapping[
    str, tuple[Any, ...]
]  # their fields that change what a model computes, and the values that jaxpipe has; of a class ANY_VALUE: all

ANY_VALUE = ()

# Fields that transformers' base class or the code of every model reads.
SUPPORTED: Supported = {
    "add_cross_attention": (False,),
    "auto_map": (None, {}),
    "is_causal": (True,),
    "is_decoder": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    "quantization_config": (None,),
    "torchscript": (False,),
}

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "relu": "relu",
}


def read_fields(theirs: Mapping[str, Any], fields: Sequence[Field], *, where: str) -> dict[str, Any]:
    """Returns our values of `fields`; ConfigError if a field has a value that jaxpipe does not support."""
    ours = {}
    for field in fields:
        # The alias only where the name itself is missing, as in transformers.
        names = [name for name in (field.theirs, field.alias) if name and name in theirs]
        value = theirs[names[0]] if names else field.default
        if field.choices is not None:
            if value not in field.choices:
                raise not_supported(where, field.theirs, value, tuple(field.choices))
            value = field.choices[value]
        ours[field.ours] = value
    return ours


def write_fields(ours: Mapping[str, Any], fields: Sequence[Field]) -> dict[str, Any]:
    """Returns their values of `fields`."""

    def theirs(field: Field) -> Any:
        value = ours[field.ours]
        # The first of several names for one meaning.
        return value if field.choices is None else next(name for name, known in field.choices.items() if known == value)

    return {field.theirs: theirs(field) for field in fields if field.theirs}


def check_supported(theirs: Mapping[str, Any], supported: Supported, *, where: str) -> None:
    """Raises ConfigError if a field of theirs has a value that jaxpipe does not support."""
    for field, values in {**SUPPORTED, **supported}.items():
        if values == ANY_VALUE:
            continue
        # A missing field has the first of the values, and so passes.
        value = theirs.get(field, values[0])
        if value not in values:
            raise not_supported(where, field, value, values)


def not_supported(where: str, theirs: str, value: Any, legal: Sequence[Any]) -> ConfigError:
    """The error for a field of theirs whose value jaxpipe does not support."""
    return ConfigError(
        f"{where}: {theirs}={value!r} changes what the model computes, and jaxpipe does not support it",
        rule="huggingface-field: every field that the model's numbers depend on has a counterpart",
        picture=f"{theirs} may be {', '.join(map(json.dumps, legal))}",
        repair="convert a model trained with a supported value; editing the field would make another model",
    )


EXPERT = "{expert}"  # in a name: the index of the expert

Array = Any  # of NumPy, or of JAX to find shapes


@dataclass(frozen=True)
class Transform:
    """A pair of inverse functions between the tensors of one parameter, as PyTorch has them, and our array.

    The tensors are those of one layer, or of the embedding or head; weights are "out in" in PyTorch
    and "in out" here. Both functions are given the anatomy of the model.
    """

    to_ours: Callable[[tuple[Array, ...], Anatomy], Array]
    to_theirs: Callable[[Array, Anatomy], tuple[Array, ...]]


@dataclass(frozen=True)
class Parameter:
    """One parameter of ours, and the tensors of theirs that hold it."""

    path: str  # path of our parameter, as "layers.attention.norm.scale"; a model without this parameter skips it
    # Names of their tensors, one for each tensor of the transform, with {layer} for the index of the layer, which of a
    # parameter of no layer is that after the last; one name with {expert} stands for those of all experts.
    names: tuple[str, ...]
    transform: Transform
    # Another name for the same numbers; a file with tied embeddings may have any of the names.
    also: tuple[str, ...] = ()
    # A name that holds the same numbers if embeddings are tied, and other numbers if they are not.
    also_tied: tuple[str, ...] = ()
    # (path, names): further names for the same numbers in a model that has the parameter of that path.
    also_with: tuple[str, tuple[str, ...]] = ("", ())

    def names_of(self, num_tensors: int) -> tuple[str, ...]:
        """The names of `num_tensors` tensors of one layer."""
        if EXPERT in self.names[0]:
            return tuple(self.names[0].replace(EXPERT, str(expert)) for expert in range(num_tensors))
        return self.names


@dataclass(frozen=True)
class Architecture:
    """One class of transformers."""

    name: str  # class name, as in "architectures" of config.json
    model_type: str
    family: str
    parameters: tuple[Parameter, ...]
    fields: tuple[Field, ...]  # fields of its config that are fields of ours under another name
    supported: Supported  # fields of its config of which jaxpipe supports only some values
    longest: Field  # the field for the longest sequence, in tokens
    # (their config, where) -> the fields of ours that `fields` cannot express; may raise ConfigError.
    read: Callable[[Mapping[str, Any], str], dict[str, Any]] = lambda theirs, where: {}
    # Our config -> the fields of theirs that `fields` cannot express, and those that never vary.
    write: Callable[[Any], dict[str, Any]] = lambda config: {}
    # Patterns for names of tensors that are no parameters and left out, with {layer} for the layer after the last.
    buffers: tuple[str, ...] = ()
    # (their config, names of the tensors in files, where) -> fields of ours that follow from what files have.
    read_names: Callable[[Mapping[str, Any], Collection[str], str], dict[str, Any]] = lambda theirs, names, where: {}
    prefix: str = ""  # prefix of tensor names, which some files omit
    heads_divide_hidden: bool = False  # whether transformers refuses another number of heads


def norm(path: str, name: str) -> tuple[Parameter, Parameter]:
    """The two parameters of a layer norm."""
    return Parameter(f"{path}.scale", (f"{name}.weight",), SAME), Parameter(f"{path}.bias", (f"{name}.bias",), SAME)


def linear(path: str, name: str, transform: Transform) -> tuple[Parameter, Parameter]:
    """The two parameters of a linear layer: its kernel with `transform`, and its bias."""
    kernel = Parameter(f"{path}.kernel", (f"{name}.weight",), transform)
    return kernel, Parameter(f"{path}.bias", (f"{name}.bias",), SAME)


def _pad_rows(tensor: Array, anatomy: Anatomy) -> Array:
    """Appends rows of zeros, up to the rows of our token table."""
    # The array's own library: NumPy for numbers, JAX where only shapes are asked for.
    xp = tensor.__array_namespace__()
    zeros = xp.zeros((anatomy.num_rows - anatomy.vocab_size, *tensor.shape[1:]), dtype=tensor.dtype)
    return xp.concat([tensor, zeros])


def _group(tensors: tuple[Array, ...], anatomy: Anatomy) -> Array:
    """Interleaves the columns of all queries, keys and values by key-value head: its queries, its key, its value.

    With two key-value heads and two query heads for each: q0 q1 q2 q3, k0 k1, v0 v1 -> q0 q1 k0 v0 q2 q3 k1 v1.
    """
    xp = tensors[0].__array_namespace__()
    leading = tensors[0].shape[:-1]
    by_group = [tensor.reshape(*leading, anatomy.num_kv_heads, -1, anatomy.head_size) for tensor in tensors]
    return xp.concat(by_group, axis=-2).reshape(*leading, -1)


def _ungroup(columns: Array, anatomy: Anatomy) -> tuple[Array, ...]:
    """The inverse of `_group`: the columns of all queries, of all keys and of all values."""
    leading = columns.shape[:-1]
    by_group = columns.reshape(*leading, anatomy.num_kv_heads, -1, anatomy.head_size)
    # The last two of a group are its key and its value.
    parts = by_group[..., :-2, :], by_group[..., -2:-1, :], by_group[..., -1:, :]
    return tuple(part.reshape(*leading, -1) for part in parts)


def _transpose(tensors: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(tensor.T for tensor in tensors)


SAME = Transform(lambda tensors, _: tensors[0], lambda array, _: (array,))

# A view: nothing is copied before the numbers are written.
TRANSPOSED = Transform(lambda tensors, _: tensors[0].T, lambda array, _: (array.T,))

# Weights of all experts, each "out in".
STACKED = Transform(
    lambda tensors, _: tensors[0].__array_namespace__().stack(_transpose(tensors)),
    lambda array, _: tuple(expert.T for expert in array),
)

# One row for each token; our table has more rows, which are padding.
TOKEN_ROWS = Transform(
    lambda tensors, anatomy: _pad_rows(tensors[0], anatomy),
    lambda array, anatomy: (array[: anatomy.vocab_size],),
)

# Three weights, "out in", or three biases: of the queries, the keys and the values.
SEPARATE_QKV_WEIGHTS = Transform(
    lambda tensors, anatomy: _group(_transpose(tensors), anatomy),
    lambda array, anatomy: _transpose(_ungroup(array, anatomy)),
)
SEPARATE_QKV_BIASES = Transform(_group, _ungroup)

# GPT-2's Conv1D: one weight, "in out", or one bias, with the columns of queries, keys and values side by side.
FUSED_QKV = Transform(
    lambda tensors, anatomy: _group(tensors[0].__array_namespace__().split(tensors[0], 3, axis=-1), anatomy),
    lambda array, anatomy: (array.__array_namespace__().concat(_ungroup(array, anatomy), axis=-1),),
)
