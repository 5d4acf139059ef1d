"""The engine that runs a table of rows both ways: from their tensors to our parameters, and back.

Goes in: an architecture, our model's config, and which tensors there are. Comes out: canonical parameters,
or their tensors one after the other. Needs the memory of one parameter, all its layers, on the way to files;
on the way to parameters that of all, 4 bytes each. Left to others: files (`files`, `headers`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.files import TensorFiles
from jaxpipe.huggingface.forms import Sizes
from jaxpipe.huggingface.headers import Entry
from jaxpipe.huggingface.listing import listed
from jaxpipe.huggingface.rows import Architecture, Row
from jaxpipe.models import LanguageModel

_LAYERS = "layers."


@dataclass(frozen=True)
class Tensor:
    """One of their tensors.

    Attributes:
        names: that it may have; in a file one or more of them.
        new_names: that it gets in a new file.
        shape: of it.
    """

    names: tuple[str, ...]
    new_names: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """What one row says of one layer, or of an end.

    Attributes:
        row: of the table.
        layer: its index; None for an end.
        tensors: as many as the row's form has.
    """

    row: Row
    layer: int | None
    tensors: tuple[Tensor, ...]


class TensorMap:
    """Which tensors hold the parameters of a model.

    Args:
        architecture: their class.
        config: of our model.
        has_prefix: whether names have the architecture's prefix.
    """

    def __init__(self, architecture: Architecture, config: Any, *, has_prefix: bool = True):
        self.architecture, self._config, self._has_prefix = architecture, config, has_prefix
        shapes = jax.eval_shape(LanguageModel(config).init, jax.random.key(0))
        leaves = jax.tree_util.tree_leaves_with_path(shapes)
        self.shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
        self._structure = jax.tree.structure(shapes)
        unmapped = self.shapes.keys() - {row.path for row in architecture.rows}
        assert not unmapped, f"{architecture.name} has no rows for {sorted(unmapped)}"

    @classmethod
    def of_names(cls, architecture: Architecture, config: Any, names: Iterable[str]) -> TensorMap:
        """The map for tensors that are there under `names`."""
        prefix = architecture.prefix
        return cls(architecture, config, has_prefix=not prefix or any(name.startswith(prefix) for name in names))

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces, row by row."""
        rows = [row for row in self.architecture.rows if row.path in self.shapes]
        return tuple(piece for row in rows for piece in self._pieces_of(row))

    @cached_property
    def new_tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor in a new file."""
        tensors = (tensor for piece in self.pieces for tensor in piece.tensors)
        return {name: tensor.shape for tensor in tensors for name in tensor.new_names}

    @cached_property
    def num_params(self) -> int:
        """Parameters of their model, one that has several names counted once."""
        return sum(int(np.prod(tensor.shape)) for piece in self.pieces for tensor in piece.tensors)

    def check(self, entries: Mapping[str, Entry], *, where: str) -> list[str]:
        """The names of `entries` that are no parameters, which are left out.

        Raises:
            ConfigError: tensors that are missing, not known, or of another shape.
        """
        tensors = [tensor for piece in self.pieces for tensor in piece.tensors]
        known = {name: tensor for tensor in tensors for name in tensor.names}
        missing = [tensor.names[0] for tensor in tensors if not any(name in entries for name in tensor.names)]
        buffers = [name for name in entries if name not in known and self._is_buffer(name)]
        extra = [name for name in entries if name not in known and not self._is_buffer(name)]
        wrong = [
            f"{name}: {entries[name].shape} in the file, {tensor.shape} by config.json"
            for name, tensor in known.items()
            if name in entries and entries[name].shape != tensor.shape
        ]
        kinds = {"missing": missing, "not known": extra, "of another shape": wrong}
        if missing or extra or wrong:
            counts = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items() if names)
            raise ConfigError(
                f"{where} is not the {self.architecture.name} of its config.json; tensors: {counts}\n"
                "  rule huggingface-tensors: a model has the tensors of its class and no others\n"
                + "".join(f"    {kind}:\n{listed(names)}" for kind, names in kinds.items() if names)
                + "  repair: take config.json and safetensors files of one model; one with more or with fewer\n"
                "      tensors becomes whole by CLASS.from_pretrained(...).save_pretrained(...) of transformers"
            )
        return buffers

    def read(self, files: TensorFiles, *, where: str) -> Any:
        """The canonical parameters, float32, of files that `check` accepts.

        Raises:
            ConfigError: two tensors that should be the same are not.
        """
        arrays = {path: np.empty(shape, np.float32) for path, shape in self.shapes.items()}
        for piece in self.pieces:
            tensors = tuple(_read(files, tensor, where=where) for tensor in piece.tensors)
            where_ours = arrays[piece.row.path] if piece.layer is None else arrays[piece.row.path][piece.layer]
            where_ours[...] = piece.row.form.to_ours(tensors, self._sizes)
        return jax.tree.unflatten(self._structure, arrays.values())

    def tensors(self, read: Callable[[str], np.ndarray]) -> Iterator[tuple[Tensor, np.ndarray]]:
        """Every tensor with its numbers, float32.

        Args:
            read: the canonical parameter at a path as "layers.attention.norm.scale".
        """
        for row in self.architecture.rows:
            if row.path not in self.shapes:
                continue
            array = read(row.path)
            for piece in self._pieces_of(row):
                own = array if piece.layer is None else array[piece.layer]
                yield from zip(piece.tensors, row.form.to_theirs(own, self._sizes), strict=True)

    @cached_property
    def _sizes(self) -> Sizes:
        anatomy = self._config.anatomy
        return Sizes(
            num_groups=anatomy.num_kv_heads,
            head_size=anatomy.head_size,
            vocab_size=anatomy.vocab_size,
            num_rows=anatomy.num_rows,
        )

    def _pieces_of(self, row: Row) -> Iterator[Piece]:
        is_stacked = row.path.startswith(_LAYERS)
        shape = self.shapes[row.path][1:] if is_stacked else self.shapes[row.path]
        ours = jax.ShapeDtypeStruct(shape, np.float32)
        theirs = jax.eval_shape(lambda array: row.form.to_theirs(array, self._sizes), ours)
        for layer in range(self._config.num_layers) if is_stacked else (None,):
            tensors = (self._tensor(row, name, layer, part.shape) for name, part in zip(row.names, theirs, strict=True))
            yield Piece(row, layer, tuple(tensors))

    def _tensor(self, row: Row, name: str, layer: int | None, shape: tuple[int, ...]) -> Tensor:
        is_tied = self._config.tie_embeddings
        same = (name, *row.also)
        # transformers writes tensors that are tied once, under the first name.
        names, new_names = ((*same, *row.also_tied), (name,)) if is_tied else (same, same)
        prefix = "" if self._has_prefix else self.architecture.prefix
        return Tensor(
            tuple(one.format(layer=layer).removeprefix(prefix) for one in names),
            tuple(one.format(layer=layer).removeprefix(prefix) for one in new_names),
            shape,
        )

    def _is_buffer(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.architecture.buffers)


def _read(files: TensorFiles, tensor: Tensor, *, where: str) -> np.ndarray:
    first, *others = (name for name in tensor.names if name in files.entries)
    numbers = files.read(first)
    for other in others:
        if not np.array_equal(numbers, files.read(other), equal_nan=True):
            raise ConfigError(
                f"{where}: {first} and {other} have different numbers\n"
                "  rule huggingface-tied: names for one parameter of the model hold the same numbers\n"
                f"      both have shape {tensor.shape}\n"
                "  repair: where the two are meant to differ, set tie_word_embeddings to false in config.json;\n"
                "      else save the model again with transformers"
            )
    return numbers
