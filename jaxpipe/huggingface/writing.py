"""Writes the files of a Hugging Face model: in the form that it came in, or as transformers would write it.

Goes in: names, shapes and numbers of tensors. Comes out: a folder that appears whole or not at all. Left to others: the
format of a file (`tensor_files`), and where the numbers come from (`tensors`).
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.source_model import SourceModel
from jaxpipe.huggingface.tensor_files import (
    CODES,
    DTYPES,
    INDEX,
    SINGLE,
    TensorWriter,
    entries,
    index_of,
    metadata,
    new_header,
)

MAX_SHARD_BYTES = 5 * 10**9  # transformers' max_shard_size, until version 5
_METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclass(frozen=True)
class ModelFiles:
    """The files to write: which tensors are in which file."""

    headers: dict[str, str]  # headers of the tensor files, by file name
    index: str | None  # text of the index; None for a single file

    @property
    def texts(self) -> dict[str, str]:
        """The contents of the files that are text, by name."""
        return {} if self.index is None else {INDEX: self.index}

    def write(self, folder: Path, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Writes all files to `folder`.

        Args:
            tensors: (name, array) of each tensor of the headers, in any order; none is kept while the next is made.

        Raises:
            ConfigError: a number exceeds the range of its dtype.
        """
        with ExitStack() as stack:
            places = {}
            for file, header in self.headers.items():
                writer = TensorWriter(folder / file, header)
                stack.callback(writer.close)
                places |= {name: (writer, DTYPES[entry.code]) for name, entry in entries(header).items()}
            for name, numbers in tensors:
                writer, dtype = places[name]
                writer.write(name, _cast(numbers, dtype, name=name))
                # A view of a parameter with all its layers, of which none may stand beside the next.
                del numbers
        for name, text in self.texts.items():
            (folder / name).write_text(text)


def files_of_source(source: SourceModel, *, dtype: str) -> ModelFiles:
    """Returns the files that the model came in, without the tensors that are no parameters.

    Args:
        dtype: dtype of all tensors; "" keeps each tensor's own.
    """
    headers = {file: _rewrite(header, source.left_out, dtype) for file, header in source.headers.items()}
    # Byte for byte the same index if no header changes.
    if source.index is None or headers == source.headers:
        return ModelFiles(headers, source.index)
    return ModelFiles(headers, index_of(headers, json.loads(source.index)))


def new_files(tensors: Mapping[str, tuple[int, ...]], *, dtype: str, max_bytes: int = MAX_SHARD_BYTES) -> ModelFiles:
    """Returns the files of a new model: one, or shards with an index.

    Args:
        max_bytes: size of the numbers of one file; a larger tensor has a file of its own.
    """
    code = CODES[dtype]
    groups: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    left = max_bytes
    for name, shape in tensors.items():
        num_bytes = DTYPES[code].itemsize * prod(shape)
        # A first tensor that is larger than a file is written all the same, in a file of its own.
        if num_bytes > left and groups[-1]:
            groups.append({})
            left = max_bytes
        groups[-1][name] = (code, shape)
        left -= num_bytes
    if len(groups) == 1:
        return ModelFiles({SINGLE: new_header(groups[0], _METADATA)}, None)
    count = len(groups)
    # Every name has the number of files, so all tensors are distributed first.
    names = [SINGLE.replace(".", f"-{number:05}-of-{count:05}.") for number in range(1, count + 1)]
    headers = {file: new_header(group, _METADATA) for file, group in zip(names, groups, strict=True)}
    return ModelFiles(headers, index_of(headers, {}))


def check_target(path: Path, *, flag: str) -> None:
    """Raises ConfigError unless `path` is missing or an empty folder."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        there = ", ".join(sorted(inner.name for inner in path.iterdir())[:5]) if path.is_dir() else "a file"
        raise ConfigError(
            f"{flag} exists already",
            rule="convert-target: nothing is overwritten",
            picture=f"found: {there}",
            repair="name a folder that does not exist, or an empty one",
        )


@contextmanager
def whole_folder(target: Path, *, flag: str) -> Iterator[Path]:
    """Yields a folder beside `target` to write to, which becomes `target` at the end, and vanishes on an error.

    Raises:
        ConfigError: `target` exists, or cannot be made or filled.
    """
    check_target(target, flag=flag)
    # Beside the target, on the same disk: renaming to another disk is no rename.
    folder = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        folder.mkdir(parents=True)
        yield folder
        folder.rename(target)
    except OSError as error:
        raise ConfigError(
            f"{flag} cannot be written",
            rule="convert-target: the folder can be made, and has room for the model",
            picture=f"{error.filename or 'while writing'}: {error.strerror}",
            repair="name another folder, get permission to write there, or free space",
        ) from error
    finally:
        # After the rename nothing has this name any more.
        shutil.rmtree(folder, ignore_errors=True)


def _cast(numbers: np.ndarray, dtype: np.dtype, *, name: str) -> np.ndarray:
    """Returns `numbers` rounded to `dtype`; ConfigError if some exceed its largest number."""
    # A number that is too large is told below, with the tensor's name.
    with np.errstate(over="ignore"):
        cast = numbers.astype(dtype)
    # Infinities of the tensor itself are not lost.
    lost = np.isfinite(numbers) & ~np.isfinite(cast)
    if lost.any():
        raise ConfigError(
            f"the tensor {name} does not fit {dtype.name}: {int(lost.sum())} of its {numbers.size} numbers",
            rule="convert-dtype: every number is within the range of the dtype",
            picture=f"the largest is {np.abs(numbers[lost]).max():g}",
            repair="write another --dtype; bfloat16 has the range of float32",
        )
    return cast


def _rewrite(header: str, left_out: tuple[str, ...], dtype: str) -> str:
    """Returns `header` with other tensors or another dtype; the same text if nothing changes."""
    kept = {name: entry for name, entry in entries(header).items() if name not in left_out}
    tensors = {name: (CODES[dtype] if dtype else entry.code, entry.shape) for name, entry in kept.items()}
    is_same = tensors == {name: (entry.code, entry.shape) for name, entry in entries(header).items()}
    return header if is_same else new_header(tensors, metadata(header))
