"""The header of a safetensors file: names, dtypes, shapes and places of its tensors.

A file is eight bytes with the length of the header, the header in JSON, and the numbers of the tensors. Two
files with the same header and the same numbers are the same file, so a header is kept as the text that it is.
Source: the format's description in the README of huggingface/safetensors.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax.numpy as jnp
import numpy as np

# The dtypes of parameters, by their name in a header.
DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": jnp.dtype(jnp.bfloat16)}
CODES = {dtype.name: code for code, dtype in DTYPES.items()}

_METADATA = "__metadata__"
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of a header.

    Attributes:
        code: of the dtype, as "F32".
        shape: of the tensor.
        start: of its numbers, in bytes from the end of the header; `end` likewise.
    """

    code: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> str:
    """The header of the file at `path`, as it stands there."""
    with path.open("rb") as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        return file.read(num_bytes).decode()


def entries(header: str) -> dict[str, Entry]:
    """The tensors of a header by name, in the order of their numbers."""
    found = {
        name: Entry(one["dtype"], tuple(one["shape"]), *one["data_offsets"])
        for name, one in json.loads(header).items()
        if name != _METADATA
    }
    return dict(sorted(found.items(), key=lambda item: item[1].start))


def metadata(header: str) -> dict[str, str]:
    """What the header says of the whole file."""
    return json.loads(header).get(_METADATA, {})


def new_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], file_metadata: Mapping[str, str]) -> str:
    """The header of a file with `tensors`, one after the other.

    Args:
        tensors: code of the dtype and shape by name.
        file_metadata: of the whole file; transformers wants {"format": "pt"}.

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
    return text + " " * (-len(text.encode()) % _ALIGNMENT_BYTES)


class Writer:
    """A safetensors file that is written tensor by tensor, in any order."""

    def __init__(self, path: Path, header: str):
        self._entries, encoded = entries(header), header.encode()
        self._first = 8 + len(encoded)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(encoded)) + encoded)
        self._file.truncate(self._first + max((one.end for one in self._entries.values()), default=0))

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Writes `tensor`, of the shape and dtype that the header has for `name`."""
        entry = self._entries[name]
        assert (tensor.shape, tensor.dtype) == (entry.shape, DTYPES[entry.code])
        self._file.seek(self._first + entry.start)
        self._file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
