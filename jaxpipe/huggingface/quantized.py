"""Quantized files: weights that stand as small numbers and scales, read as bfloat16 on the way in.

Goes in: the files of a model whose config.json says how they are quantized, and a `Format`. Comes out: the same with
each weight in place of its numbers and scales. Left to others: what they are (`mxfp4`, `fp8`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.huggingface import fp8, mxfp4
from jaxpipe.huggingface.deepseek import DEEPSEEK_V3
from jaxpipe.huggingface.gpt_oss import GPT_OSS
from jaxpipe.huggingface.tensor_files import (
    DTYPES,
    Entry,
    Files,
    TensorFiles,
    entries,
    index_of,
    metadata,
    new_header,
)

FIELD = "quantization_config"


@dataclass(frozen=True)
class Format:
    """How the weights of a class of transformers are quantized.

    Attributes:
        told: fields of "quantization_config" that say so, with their values.
        architecture: the class.
        numbers, scales: what the names of both tensors of a weight have after the weight's own.
        code: dtype of the numbers.
        is_pair: whether entries of numbers and scales fit together.
        shape: the weight's shape, from that of its numbers.
        dequantized: (bytes of numbers, bytes of scales) -> the weight, float32.
        rule: of both tensors, for errors.
    """

    told: dict[str, Any]
    architecture: str
    numbers: str
    scales: str
    code: str
    is_pair: Callable[[Entry, Entry], bool]
    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    dequantized: Callable[[np.ndarray, np.ndarray], np.ndarray]
    rule: str


MXFP4 = Format(
    {"quant_method": "mxfp4"},
    GPT_OSS.name,
    mxfp4.BLOCKS,
    mxfp4.SCALES,
    "U8",
    mxfp4.is_pair,
    mxfp4.shape_of,
    mxfp4.dequantized,
    "huggingface-mxfp4: U8 blocks [expert, out, group, byte] and scales [expert, out, group]",
)
FP8 = Format(
    {"quant_method": "fp8", "weight_block_size": [fp8.BLOCK, fp8.BLOCK]},
    DEEPSEEK_V3.name,
    "",
    fp8.SCALES,
    fp8.CODE,
    fp8.is_pair,
    tuple,
    fp8.dequantized,
    f"huggingface-fp8: {fp8.CODE} weights [out, in] and F32 scales, one for each {fp8.BLOCK} x {fp8.BLOCK}",
)
FORMATS = (MXFP4, FP8)


def unquantized(theirs: dict[str, Any]) -> dict[str, Any]:
    """A config.json without what says that its files are in a known format."""
    about = theirs.get(FIELD)
    for known in FORMATS:
        is_told = isinstance(about, dict) and all(about.get(name) == value for name, value in known.told.items())
        if is_told and theirs.get("architectures") == [known.architecture]:
            return {name: value for name, value in theirs.items() if name != FIELD}
    return theirs


def opened(folder: Path) -> Files:
    """The tensor files in `folder`, dequantized if any are in a known format; errors of both classes of files."""
    files = TensorFiles(folder)
    for known in FORMATS:
        if any(
            (name.endswith(known.numbers) and known.numbers != "") or entry.code == known.code != "U8"
            for name, entry in files.entries.items()
        ):
            return DequantizedFiles(files, known)
    return files


class DequantizedFiles:
    """The tensors of quantized files, in which each dequantized weight stands as bfloat16 in place of its numbers."""

    def __init__(self, files: TensorFiles, known: Format):
        """Finds the pairs of numbers and scales; ConfigError if one of a pair is missing or has another shape."""
        self._files = files
        self._format = known
        self._weights = {
            name.removesuffix(known.numbers)
            for name, entry in files.entries.items()
            if (name.endswith(known.numbers) if known.numbers else entry.code == known.code)
        }
        for name in sorted(self._weights):
            numbers = files.entries[name + known.numbers]
            scales = files.entries.get(name + known.scales)
            if scales is None or numbers.code != known.code or not known.is_pair(numbers, scales):
                raise ConfigError(
                    f"{name} has the numbers {_told(numbers)} and the scales {_told(scales)}",
                    rule=known.rule,
                    repair="download the model again",
                )
        others = [name for name, entry in files.entries.items() if entry.code not in DTYPES and not self._is_part(name)]
        if others:
            raise ConfigError(
                f"{others[0]} has dtype {files.entries[others[0]].code}, and is no numbers or scales of a weight",
                rule=f"huggingface-dtype: the dtype of a parameter is one of {', '.join(DTYPES)}",
                repair="download the model again",
            )
        # The header that each file would have, by its name.
        self.headers = {file: self._dequantized(header) for file, header in files.headers.items()}
        # The entry of each tensor, by its name.
        self.entries = {name: entry for header in self.headers.values() for name, entry in entries(header).items()}
        # Text of the index, with the new size; None for a single file.
        self.index = None if files.index is None else index_of(self.headers, json.loads(files.index))

    def read(self, name: str) -> np.ndarray:
        """Returns the tensor `name`, float32; `TensorFiles.read` has the errors."""
        if name not in self._weights:
            return self._files.read(name)
        parts = (self._files.read_bytes(name + ending) for ending in (self._format.numbers, self._format.scales))
        return self._format.dequantized(*parts)

    def _is_part(self, name: str) -> bool:
        endings = (self._format.numbers, self._format.scales)
        return any(name.endswith(ending) and name.removesuffix(ending) in self._weights for ending in endings)

    def _dequantized(self, header: str) -> str:
        tensors = {}
        for name, entry in entries(header).items():
            weight = name.removesuffix(self._format.numbers)
            if weight in self._weights and weight + self._format.numbers == name:
                tensors[weight] = ("BF16", self._format.shape(entry.shape))
            elif not self._is_part(name):
                tensors[name] = (entry.code, entry.shape)
        return new_header(tensors, metadata(header))


def _told(entry: Entry | None) -> str:
    return "nowhere" if entry is None else f"{entry.code}{list(entry.shape)}"
