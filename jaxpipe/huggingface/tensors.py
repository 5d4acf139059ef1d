"""The engine that runs a table both ways: from the tensors of transformers to our parameters, and back.

Goes in: an architecture, our model's config, and the names of tensors. Comes out: canonical parameters, or their
tensors one after the other. Needs memory for all parameters, 4 bytes each, and one tensor on the way in; and for one
parameter with all its layers on the way out. Left to others: files (`tensor_files`, `writing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import jax
import numpy as np

from jaxpipe.errors import ConfigError, first_of
from jaxpipe.huggingface.mapping import TOKEN_ROWS, Architecture, Parameter
from jaxpipe.huggingface.tensor_files import Entry, Files
from jaxpipe.models import LanguageModel
from jaxpipe.models.kinds import pattern_of

_LAYERS = "layers."


@dataclass(frozen=True)
class Tensor:
    """A tensor of a transformers model."""

    names: tuple[str, ...]  # the names that it may have; a file has one or more of them
    written: tuple[str, ...]  # the names that it is written under
    shape: tuple[int, ...]


@dataclass(frozen=True)
class LayerTensors:
    """The tensors that hold one parameter in one layer, or in the embedding or head."""

    parameter: Parameter  # the row of the table
    layer: int | None  # index of the layer; None outside the layers
    row: int | None  # its index among the layers that have the parameter
    tensors: tuple[Tensor, ...]

    def named(self, arrays: Sequence[Any]) -> list[tuple[str, Any]]:
        """(name, array) under all names, given the array of each tensor."""
        pairs = zip(self.tensors, arrays, strict=True)
        return [(name, array) for tensor, array in pairs for name in tensor.written]


class TensorMap:
    """The tensors that hold the parameters of a model of ours, by name and shape."""

    def __init__(self, architecture: Architecture, config: Any, *, in_files: Collection[str] = ()):
        """Makes the map.

        Args:
            in_files: names of the tensors in the files that it is for, which may lack a prefix; () for new files.
        """
        self.architecture = architecture
        self._config = config
        self._in_files = in_files
        prefix = architecture.prefix
        # Files of a base model leave the prefix out, all or none.
        self._has_prefix = not (prefix and in_files) or any(name.startswith(prefix) for name in in_files)
        shapes = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        self.shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
        self._structure = jax.tree.structure(shapes)
        unmapped = self.shapes.keys() - {parameter.path for parameter in architecture.parameters}
        # A fault of the table and not of a file, so no error for users.
        assert not unmapped, f"{architecture.name} has no tensors for {sorted(unmapped)}"

    @cached_property
    def groups(self) -> tuple[LayerTensors, ...]:
        """The tensors of all parameters, parameter by parameter, layer by layer."""
        parameters = [parameter for parameter in self.architecture.parameters if parameter.path in self.shapes]
        return tuple(group for parameter in parameters for group in self._groups_of(parameter))

    @cached_property
    def new_tensors(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor in a new file, by name."""
        tensors = (tensor for group in self.groups for tensor in group.tensors)
        return {name: tensor.shape for tensor in tensors for name in tensor.written}

    @cached_property
    def token_tables(self) -> frozenset[str]:
        """The names of the tensors that have a row for each token."""
        tables = [group for group in self.groups if group.parameter.transform is TOKEN_ROWS]
        return frozenset(name for group in tables for tensor in group.tensors for name in tensor.names)

    @cached_property
    def num_params(self) -> int:
        """Number of parameters of the transformers model; a tensor with several names counts once."""
        return sum(int(np.prod(tensor.shape)) for group in self.groups for tensor in group.tensors)

    @staticmethod
    def is_stacked(path: str) -> bool:
        """Whether our parameter at `path` has an axis of layers in front."""
        return path.startswith(_LAYERS)

    def check(self, entries: Mapping[str, Entry], *, where: str) -> list[str]:
        """The names that are no parameters; ConfigError if tensors are missing, unknown, or of another shape."""
        tensors = [tensor for group in self.groups for tensor in group.tensors]
        known = {name: tensor for tensor in tensors for name in tensor.names}
        missing = [tensor.names[0] for tensor in tensors if not any(name in entries for name in tensor.names)]
        # A name of a parameter is one, even if it also looks like a buffer's.
        buffers = [name for name in entries if name not in known and self._is_buffer(name)]
        extra = [name for name in entries if name not in known and not self._is_buffer(name)]
        wrong = [
            f"{name}: {entries[name].shape} in the file, {tensor.shape} by config.json"
            for name, tensor in known.items()
            if name in entries and entries[name].shape != tensor.shape
        ]
        kinds = {"missing": missing, "unknown": extra, "of another shape": wrong}
        if missing or extra or wrong:
            counts = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items() if names)
            raise ConfigError(
                f"{where} is not the {self.architecture.name} of its config.json; tensors: {counts}",
                rule="huggingface-tensors: a model has the tensors of its class and no others",
                picture="\n".join(f"{kind}:\n{first_of(names)}" for kind, names in kinds.items() if names),
                repair="use config.json and safetensors files of one model; transformers completes one with more or"
                " fewer tensors: CLASS.from_pretrained(...).save_pretrained(...)",
            )
        return buffers

    def read(self, files: Files, *, where: str) -> Any:
        """The canonical parameters, float32; ConfigError if two tensors of one parameter have different numbers."""
        # Whole parameters, filled layer by layer: stacking a list of layers would hold all of it twice.
        arrays = {path: np.empty(shape, np.float32) for path, shape in self.shapes.items()}
        for group in self.groups:
            tensors = tuple(_read(files, tensor, where=where) for tensor in group.tensors)
            array = arrays[group.parameter.path]
            slot = array if group.row is None else array[group.row]
            slot[...] = group.parameter.transform.to_ours(tensors, self._config.anatomy)
        return jax.tree.unflatten(self._structure, arrays.values())

    def tensors(self, read: Callable[[str], Any]) -> Iterator[tuple[str, np.ndarray]]:
        """Yields (name, array) of every tensor, float32, in the order of `groups`.

        Arrays may be views of a parameter with all its layers. One such parameter is in memory, if none is kept.

        Args:
            read: returns the canonical parameter at a path, for example "layers.attention.norm.scale"; one with layers
                gives that of each by its index.
        """
        for path, groups in groupby(self.groups, key=lambda group: group.parameter.path):
            # By a function of its own, which lets a parameter go before the next one is read.
            yield from self._tensors_of(read(path), groups)

    def _tensors_of(self, array: Any, groups: Iterable[LayerTensors]) -> Iterator[tuple[str, np.ndarray]]:
        for group in groups:
            of_layer = array if group.row is None else array[group.row]
            yield from group.named(group.parameter.transform.to_theirs(of_layer, self._config.anatomy))

    def _groups_of(self, parameter: Parameter) -> Iterator[LayerTensors]:
        # Parameters of layers have an axis of layers in front, which no tensor of theirs has.
        is_stacked = self.is_stacked(parameter.path)
        shape = self.shapes[parameter.path][1:] if is_stacked else self.shapes[parameter.path]
        ours = jax.ShapeDtypeStruct(shape, np.float32)
        # The shapes of their tensors by tracing, so that the transforms alone say how ours are cut.
        theirs = jax.eval_shape(lambda array: parameter.transform.to_theirs(array, self._config.anatomy), ours)
        for row, layer in enumerate(self._layers_with(parameter.path)) if is_stacked else ((None, None),):
            tensors = (
                self._tensor(parameter, name, layer, part.shape)
                for name, part in zip(parameter.names_of(len(theirs)), theirs, strict=True)
            )
            yield LayerTensors(parameter, layer, row, tuple(tensors))

    def _layers_with(self, path: str) -> list[int]:
        """The layers that have the parameter at `path`."""
        pattern = pattern_of(self._config)
        kinds = pattern.kinds_with(path.removeprefix(_LAYERS).partition(".")[0])
        of_layers = pattern.kinds(self._config.num_layers)
        return [layer for layer, kind in enumerate(of_layers) if kinds is None or kind in kinds]

    def _tensor(self, parameter: Parameter, name: str, layer: int | None, shape: tuple[int, ...]) -> Tensor:
        is_tied = self._config.tie_embeddings
        path, names_with = parameter.also_with
        same = (name, *parameter.also, *(names_with if path in self.shapes else ()))
        # transformers writes tied tensors once, under the first name.
        of_file, of_new_file = ((*same, *parameter.also_tied), (name,)) if is_tied else (same, same)
        prefix = "" if self._has_prefix else self.architecture.prefix

        def completed(names: tuple[str, ...]) -> tuple[str, ...]:
            place = self._config.num_layers if layer is None else layer
            return tuple(candidate.format(layer=place).removeprefix(prefix) for candidate in names)

        names = completed(of_file)
        # Tied embeddings stand in files once or twice.
        there = tuple(candidate for candidate in names if candidate in self._in_files)
        return Tensor(names, there or completed(of_new_file), shape)

    def _is_buffer(self, name: str) -> bool:
        after_last = str(self._config.num_layers)
        patterns = (pattern.replace("{layer}", after_last) for pattern in self.architecture.buffers)
        return any(re.fullmatch(pattern, name) for pattern in patterns)


def _read(files: Files, tensor: Tensor, *, where: str) -> np.ndarray:
    first, *others = (name for name in tensor.names if name in files.entries)
    numbers = files.read(first)
    for other in others:
        # NaN equals NaN here: the same damaged weight under two names is still one parameter.
        if not np.array_equal(numbers, files.read(other), equal_nan=True):
            raise ConfigError(
                f"{where}: {first} and {other} have different numbers",
                rule="huggingface-tied: tensors of one parameter have the same numbers",
                picture=f"both have shape {tensor.shape}",
                repair="if the two are meant to differ, set tie_word_embeddings to false in config.json; else save"
                " the model again with transformers",
            )
    return numbers
