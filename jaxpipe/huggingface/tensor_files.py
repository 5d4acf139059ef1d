"""The safetensors files of a model: one, or shards with an index, read and written tensor by tensor.

A safetensors file is eight bytes with the length of the header, the header in JSON, and the numbers of the tensors. Two
files with the same header and the same numbers are the same file, so a header is kept as text, unchanged. Left to
others: what the tensors mean (`tensors`), and which tensors a new model has in which file (`writing`).

Source: the format's description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpipe.errors import ConfigError, first_of
from jaxpipe.files import read_whole

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


# The dtypes of parameters, by their names in a header.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": jnp.dtype(jnp.bfloat16)}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}

_METADATA = "__metadata__"
_ALIGNMENT_BYTES = 8


class Files(Protocol):
    """Tensor files, or what stands for them: headers by file, entries by tensor, the index if there is one."""

    headers: dict[str, str]
    entries: dict[str, Entry]
    index: str | None

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, float32."""
        ...


class TensorFiles:
    """All tensors of the files in a folder."""

    def __init__(self, folder: Path, *, single: str = SINGLE):
        """Opens the files.

        Args:
            folder: where they are.
            single: name of the file that has all tensors, if one has.

        Raises:
            ConfigError: a file is missing or damaged, or a tensor is in two files or in another than the index says.
        """
        self._folder = folder
        # A single file comes before an index that lies beside it, as in transformers.
        # Text of the index; None for a single file.
        self.index = None if (folder / single).is_file() else _read_index(folder)
        names = [single] if self.index is None else _shards(folder, self.index)
        for name in names:
            _check_whole(folder / name)
        self.headers = {name: read_header(folder / name) for name in names}  # the header of each file, by its name
        in_file = {name: entries(header) for name, header in self.headers.items()}
        self._check_once(in_file)
        # The entry of each tensor, by its name.
        self.entries: dict[str, Entry] = {name: entry for file in in_file.values() for name, entry in file.items()}
        self._file_of = {name: file for file, of_file in in_file.items() for name in of_file}
        if self.index is not None:
            self._check_index(json.loads(self.index)["weight_map"])

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor `name`, float32; ConfigError if the tensor's dtype is not one of a parameter."""
        entry = self.entries[name]
        path = self._folder / self._file_of[name]
        if entry.code not in DTYPES:
            raise ConfigError(
                f"the tensor {name} of {path} has dtype {entry.code}",
                rule=f"huggingface-dtype: the dtype of a parameter is one of {', '.join(DTYPES)}",
                repair="convert a model that is not quantized",
            )
        # Every dtype of a parameter is exact in float32; an array that is one already is not copied.
        return self._content(name).view(DTYPES[entry.code]).reshape(entry.shape).astype(np.float32, copy=False)

    def read_bytes(self, name: str) -> np.ndarray:
        """Returns the bytes of the tensor `name`, uint8, in a last dim if a number has several."""
        entry = self.entries[name]
        numbers = self._content(name).reshape(*entry.shape, -1)
        return numbers[..., 0] if numbers.shape[-1] == 1 else numbers

    def _content(self, name: str) -> np.ndarray:
        """The bytes of a tensor."""
        entry = self.entries[name]
        file = self._file_of[name]
        first = _first_of(self.headers[file]) + entry.start
        # Read and not mapped, so that no more than this tensor is in memory.
        return np.fromfile(self._folder / file, np.uint8, entry.end - entry.start, offset=first)

    def _check_once(self, in_file: dict[str, dict[str, Entry]]) -> None:
        files_of: dict[str, list[str]] = {}
        for file, names in in_file.items():
            for name in names:
                files_of.setdefault(name, []).append(file)
        twice = [f"{name}: in {' and in '.join(files)}" for name, files in files_of.items() if len(files) > 1]
        if twice:
            raise ConfigError(
                f"{self._folder} has {len(twice)} tensors in two files",
                rule="huggingface-shards: each tensor is in one file",
                picture=first_of(twice),
                repair="remove the files of another download or save, and download the model again",
            )

    def _check_index(self, weight_map: dict[str, str]) -> None:
        names = sorted(weight_map.keys() | self._file_of.keys())
        different = [
            f"{name}: {weight_map.get(name, 'nowhere')} in the index, {self._file_of.get(name, 'in no file')} in fact"
            for name in names
            if weight_map.get(name) != self._file_of.get(name)
        ]
        if different:
            raise ConfigError(
                f"{self._folder / INDEX} names another file for {len(different)} tensors",
                rule="huggingface-index: the index names the file of every tensor",
                picture=first_of(different),
                repair="download or save the model again, index and files together",
            )


class GrownFiles:
    """The tensors of files, some of which have further rows: each new one is the mean of those that are there.

    Source: for the mean, Hewitt 2021, "Initializing new word embeddings for pretrained language models"; transformers'
    `resize_token_embeddings` draws around it.
    """

    def __init__(self, files: Files, names: frozenset[str], *, num_rows: int):
        """Adds rows."""
        self._files = files
        self._names = names
        self._num_rows = num_rows
        # The header that each file would have, by its name.
        self.headers = {file: self._grown(header) for file, header in files.headers.items()}
        # The entry of each tensor, by its name.
        self.entries = {name: entry for header in self.headers.values() for name, entry in entries(header).items()}
        # Text of the index, with the new size; None for a single file.
        self.index = None if files.index is None else index_of(self.headers, json.loads(files.index))

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor `name`, float32; `TensorFiles.read` has the errors."""
        numbers = self._files.read(name)
        if name not in self._names:
            return numbers
        # In float64: a float32 sum over all rows of a table loses digits.
        mean = numbers.mean(axis=0, dtype=np.float64, keepdims=True).astype(np.float32)
        return np.concatenate([numbers, np.repeat(mean, self._num_rows - len(numbers), axis=0)])

    def _grown(self, header: str) -> str:
        tensors = {
            name: (entry.code, (self._num_rows, *entry.shape[1:]) if name in self._names else entry.shape)
            for name, entry in entries(header).items()
        }
        return new_header(tensors, metadata(header))


def _read_index(folder: Path) -> str:
    path = folder / INDEX
    if not path.is_file():
        there = [name for name in _PICKLED if (folder / name).is_file()]
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX}",
            rule="huggingface-files: the tensors are in safetensors files",
            picture=f"there is {', '.join(there)}, which can contain programs and is not read" if there else "",
            repair="load it with transformers and save it again: save_pretrained(FOLDER) writes safetensors",
        )
    try:
        text = read_whole(path)
        index = json.loads(text)
        if not all(isinstance(name, str) for name in index["weight_map"].values()):
            raise TypeError("a file's name is no text")
        if not isinstance(index.get("metadata") or {}, dict):
            raise TypeError("its metadata is no object")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            rule='huggingface-index: JSON with "weight_map", the file of every tensor',
            repair="download or save the model again",
        ) from error
    return text


def _shards(folder: Path, index: str) -> list[str]:
    """Returns the files of an index, in its order."""
    names = list(dict.fromkeys(json.loads(index)["weight_map"].values()))
    # A name with a folder in it would lead out of the model's folder.
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(names)} files of {INDEX}",
            rule="huggingface-shards: all files of the index are in the folder itself",
            picture=first_of(missing),
            repair="download the missing files",
        )
    return names


def _check_whole(path: Path) -> None:
    """Raises ConfigError unless the file at `path` is one of the format, complete."""
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            rule="huggingface-files: a complete file in the safetensors format",
            picture=f"it has {path.stat().st_size} bytes",
            repair="download the file again; it may be incomplete, or the pointer of Git LFS",
        ) from error


def _first_of(header: str) -> int:
    """Place of the first byte of numbers in a file with this header."""
    return 8 + len(header.encode())


@dataclass(frozen=True)
class Entry:
    """One tensor in a header: its dtype, shape and place in the file."""

    code: str  # code of the dtype, for example "F32"
    shape: tuple[int, ...]
    start: int  # first byte of its numbers, counted from the end of the header
    end: int  # byte after the last one


def read_header(path: Path) -> str:
    """Returns the header of the file at `path`, unchanged."""
    with path.open("rb") as file:
        # Eight bytes, little-endian: the length of the header.
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        return file.read(num_bytes).decode()


def entries(header: str) -> dict[str, Entry]:
    """Returns the tensors of a header by name, in the order of their numbers in the file."""
    by_name = {
        name: Entry(fields["dtype"], tuple(fields["shape"]), *fields["data_offsets"])
        for name, fields in json.loads(header).items()
        if name != _METADATA
    }
    # A header may name tensors in another order than that of their numbers.
    return dict(sorted(by_name.items(), key=lambda item: item[1].start))


def metadata(header: str) -> dict[str, str]:
    """Returns the metadata of the whole file in a header."""
    return json.loads(header).get(_METADATA, {})


def new_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], file_metadata: Mapping[str, str]) -> str:
    """Returns the header of a file with `tensors`, in their order.

    Args:
        tensors: code of the dtype and shape, by name.
        file_metadata: metadata of the whole file; transformers requires {"format": "pt"}.

    Example:
        >>> new_header({"x": ("F32", (2, 3))}, {})
        '{"__metadata__":{},"x":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}}     '
    """
    header: dict[str, object] = {_METADATA: dict(file_metadata)}
    start = 0
    for name, (code, shape) in tensors.items():
        end = start + DTYPES[code].itemsize * prod(shape)
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    # Spaces at the end are JSON too; the format asks for numbers that begin at a multiple of eight.
    return text + " " * (-len(text.encode()) % _ALIGNMENT_BYTES)


def index_of(headers: Mapping[str, str], before: Mapping[str, Any]) -> str:
    """Returns the text of the index of files with these headers, given what it had before."""
    in_files = {file: entries(header) for file, header in headers.items()}
    size = sum(entry.end - entry.start for of_file in in_files.values() for entry in of_file.values())
    index = {
        **before,
        # The metadata may be null; the size counts numbers, not headers.
        "metadata": (before.get("metadata") or {}) | {"total_size": size},
        "weight_map": {name: file for file, of_file in in_files.items() for name in of_file},
    }
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


class TensorWriter:
    """Writes a safetensors file tensor by tensor, in any order."""

    def __init__(self, path: Path, header: str):
        self._entries = entries(header)
        encoded = header.encode()
        self._first = _first_of(header)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(encoded)) + encoded)
        # The whole size at once, since tensors are written in any order.
        self._file.truncate(self._first + max((entry.end for entry in self._entries.values()), default=0))

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes `tensor`, whose shape and dtype are those of `name` in the header."""
        entry = self._entries[name]
        assert (tensor.shape, tensor.dtype) == (entry.shape, DTYPES[entry.code])
        self._file.seek(self._first + entry.start)
        # Through bytes: NumPy has no buffer of bfloat16.
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
