"""Which tensors go into which files of a model that is written: as they came, or as transformers would.

Goes in: names and shapes, and the form in which the model came. Comes out: a header for every file, and the
index. Left to others: numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from jaxpipe.huggingface.files import INDEX, SINGLE
from jaxpipe.huggingface.headers import CODES, DTYPES, entries, metadata, new_header
from jaxpipe.huggingface.origin import Origin

MAX_SHARD_BYTES = 5 * 10**9  # transformers' max_shard_size, until version 5
_METADATA = {"format": "pt"}  # transformers refuses files that do not say so


@dataclass(frozen=True)
class FileLayout:
    """The files to write.

    Attributes:
        headers: of the tensor files, by name.
        index: text of the index, None for a single file.
    """

    headers: dict[str, str]
    index: str | None

    @property
    def texts(self) -> dict[str, str]:
        """The files that are text."""
        return {} if self.index is None else {INDEX: self.index}


def as_it_came(origin: Origin, *, dtype: str) -> FileLayout:
    """The files that the model came in, without what is no parameter.

    Args:
        origin: the form in which it came.
        dtype: of all tensors, "" for each one's own.
    """
    headers = {file: _rewritten(header, origin.left_out, dtype) for file, header in origin.headers.items()}
    if origin.index is None or headers == origin.headers:
        return FileLayout(headers, origin.index)
    index = json.loads(origin.index)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in origin.left_out}
    index["metadata"] = index.get("metadata", {}) | {"total_size": sum(map(_num_bytes, headers.values()))}
    return FileLayout(headers, _index_text(index))


def as_new(tensors: Mapping[str, tuple[int, ...]], *, dtype: str, max_bytes: int = MAX_SHARD_BYTES) -> FileLayout:
    """One file, or shards with an index.

    Args:
        tensors: shapes by name.
        dtype: of all.
        max_bytes: numbers of one file; a larger tensor has a file of its own.
    """
    code = CODES[dtype]
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    left = max_bytes
    for name, shape in tensors.items():
        num_bytes = DTYPES[code].itemsize * prod(shape)
        if num_bytes > left and groups[-1]:
            groups.append({})
            left = max_bytes
        groups[-1][name] = (code, shape)
        left -= num_bytes
    if len(groups) == 1:
        return FileLayout({SINGLE: new_header(groups[0], _METADATA)}, None)
    count = len(groups)
    names = [SINGLE.replace(".", f"-{number:05}-of-{count:05}.") for number in range(1, count + 1)]
    headers = {file: new_header(group, _METADATA) for file, group in zip(names, groups, strict=True)}
    weight_map = {name: file for file, group in zip(names, groups, strict=True) for name in group}
    total = sum(map(_num_bytes, headers.values()))
    return FileLayout(headers, _index_text({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _rewritten(header: str, left_out: tuple[str, ...], dtype: str) -> str:
    """`header` itself where nothing changes."""
    kept = {name: entry for name, entry in entries(header).items() if name not in left_out}
    tensors = {name: (CODES[dtype] if dtype else entry.code, entry.shape) for name, entry in kept.items()}
    is_same = tensors == {name: (entry.code, entry.shape) for name, entry in entries(header).items()}
    return header if is_same else new_header(tensors, metadata(header))


def _num_bytes(header: str) -> int:
    return sum(entry.end - entry.start for entry in entries(header).values())


def _index_text(index: dict) -> str:
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
