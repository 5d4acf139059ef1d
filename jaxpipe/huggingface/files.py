"""The safetensors files of a model: one, or shards with an index, read tensor by tensor.

Goes in: a folder. Comes out: names, shapes, headers and, one at a time, tensors. Left to others: what the
tensors mean (`tensors`).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface.headers import DTYPES, Entry, entries, read_header
from jaxpipe.huggingface.listing import listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack")


class TensorFiles:
    """All tensors of the files in a folder.

    Attributes:
        headers: of each file, by its name.
        entries: of each tensor, by its name.
        index: text of the index, None for a single file.
    """

    def __init__(self, folder: Path):
        """Opens the files.

        Raises:
            ConfigError: files that are not there or not whole, or tensors in two of them or in another than
                the index says.
        """
        self._folder = folder
        self.index = None if (folder / SINGLE).is_file() else _read_index(folder)
        names = [SINGLE] if self.index is None else _shards(folder, self.index)
        self._open = {name: _open(folder / name) for name in names}
        self.headers = {name: read_header(folder / name) for name in names}
        in_file = {name: entries(header) for name, header in self.headers.items()}
        self._check_once(in_file)
        self.entries: dict[str, Entry] = {name: entry for file in in_file.values() for name, entry in file.items()}
        self._file_of = {name: file for file, found in in_file.items() for name in found}
        if self.index is not None:
            self._check_index(json.loads(self.index)["weight_map"])

    def read(self, name: str) -> np.ndarray:
        """The tensor `name`, float32.

        Raises:
            ConfigError: it is of another dtype than a parameter.
        """
        code = self.entries[name].code
        if code not in DTYPES:
            raise ConfigError(
                f"the tensor {name} of {self._folder / self._file_of[name]} has dtype {code}\n"
                f"  rule huggingface-dtype: a parameter has one of {', '.join(DTYPES)}\n"
                "  repair: convert a model that is not quantized"
            )
        return self._open[self._file_of[name]].get_tensor(name).astype(np.float32, copy=False)

    def _check_once(self, in_file: dict[str, dict[str, Entry]]) -> None:
        files_of: dict[str, list[str]] = {}
        for file, names in in_file.items():
            for name in names:
                files_of.setdefault(name, []).append(file)
        twice = [f"{name}: in {' and in '.join(files)}" for name, files in files_of.items() if len(files) > 1]
        if twice:
            raise ConfigError(
                f"{self._folder} has {len(twice)} tensors in two files\n"
                "  rule huggingface-shards: a tensor stands in one file\n"
                f"{listed(twice)}"
                "  repair: remove what is left of another download or save, and load the model again"
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
                f"{self._folder / INDEX} has {len(different)} tensors where they are not\n"
                "  rule huggingface-index: the index names the file of every tensor\n"
                f"{listed(different)}"
                "  repair: load or save the model again, index and files together"
            )


def _read_index(folder: Path) -> str:
    path = folder / INDEX
    if not path.is_file():
        there = [name for name in _PICKLED if (folder / name).is_file()]
        raise ConfigError(
            f"{folder} has neither {SINGLE} nor {INDEX}\n"
            "  rule huggingface-files: the tensors stand in safetensors files\n"
            + (f"      there is {', '.join(there)}, which can hold programs and is not read\n" if there else "")
            + "  repair: load it with transformers and save it again: save_pretrained(FOLDER) writes safetensors"
        )
    text = path.read_text()
    try:
        json.loads(text)["weight_map"].items()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}\n"
            '  rule huggingface-index: JSON with "weight_map", the file of every tensor\n'
            "  repair: load or save the model again"
        ) from error
    return text


def _shards(folder: Path, index: str) -> list[str]:
    """The files of an index, in its order."""
    names = list(dict.fromkeys(json.loads(index)["weight_map"].values()))
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} of the {len(names)} files of {INDEX}\n"
            "  rule huggingface-shards: all files of the index are there, in the folder itself\n"
            f"{listed(missing)}"
            "  repair: load the missing files"
        )
    return names


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}\n"
            "  rule huggingface-files: a whole file in the safetensors format\n"
            f"      it has {path.stat().st_size} bytes\n"
            "  repair: load the file again; a download may have been cut off, or be the pointer of Git LFS"
        ) from error
