"""MXFP4 files of gpt-oss: each expert's weights as 4-bit numbers, 32 of which share a power of two; read as bfloat16.

A weight "expert out in" stands in two tensors: NAME_blocks, uint8 "expert out group byte", two numbers a byte, the
first in its low half; and NAME_scales, uint8 "expert out group", exponents plus 127. Ours and transformers' dequantized
weight is "expert in out". Every value is exact in bfloat16.
Source: OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3; transformers, integrations/mxfp4.py,
`convert_moe_packed_tensors`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.errors import ConfigError
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

BLOCKS = "_blocks"
SCALES = "_scales"
FIELD = "quantization_config"
# Sign, two bits of exponent, one of mantissa: E2M1.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BIAS = 127  # of the exponents, E8M0


def unquantized(theirs: dict[str, Any]) -> dict[str, Any]:
    """A config.json without what says that the files of a gpt-oss are in MXFP4."""
    about = theirs.get(FIELD)
    is_mxfp4 = isinstance(about, dict) and about.get("quant_method") == "mxfp4"
    if not is_mxfp4 or theirs.get("architectures") != [GPT_OSS.name]:
        return theirs
    return {name: value for name, value in theirs.items() if name != FIELD}


def opened(folder: Path) -> Files:
    """The tensor files in `folder`, dequantized if any are in MXFP4; errors of `TensorFiles` and `DequantizedFiles`."""
    files = TensorFiles(folder)
    return DequantizedFiles(files) if any(name.endswith(BLOCKS) for name in files.entries) else files


def dequantized(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weight "expert in out", float32, of blocks "expert out group byte" and scales "expert out group", uint8.

    Example:
        >>> blocks, scales = np.array([[[[0x21, 0xF0]]]], np.uint8), np.array([[[128]]], np.uint8)
        >>> dequantized(blocks, scales)[0, :, 0].tolist()
        [1.0, 2.0, 0.0, -12.0]
    """
    halves = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*scales.shape, -1)
    weight = np.ldexp(VALUES[halves], scales[..., None].astype(np.int32) - _BIAS)
    return weight.reshape(*scales.shape[:2], -1).transpose(0, 2, 1)


class DequantizedFiles:
    """The tensors of MXFP4 files, in which each dequantized weight stands as bfloat16 in place of its blocks."""

    def __init__(self, files: TensorFiles):
        """Finds the pairs of blocks and scales; ConfigError if one of a pair is missing or has another shape."""
        self._files = files
        self._weights = {name.removesuffix(BLOCKS) for name in files.entries if name.endswith(BLOCKS)}
        for name in sorted(self._weights):
            blocks = files.entries[name + BLOCKS]
            scales = files.entries.get(name + SCALES)
            is_pair = scales is not None and (blocks.shape[:-1], blocks.code) == (scales.shape, scales.code)
            if not is_pair or blocks.code != "U8" or len(blocks.shape) != 4:
                raise ConfigError(
                    f"{name} has the blocks {_told(blocks)} and the scales {_told(scales)}",
                    rule="huggingface-mxfp4: U8 blocks [expert, out, group, byte] and scales [expert, out, group]",
                    repair="download the model again",
                )
        others = [name for name, entry in files.entries.items() if entry.code not in DTYPES and not self._is_part(name)]
        if others:
            raise ConfigError(
                f"{others[0]} has dtype {files.entries[others[0]].code}, and is no blocks or scales of a weight",
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
        return dequantized(*(self._files.read_bytes(name + ending) for ending in (BLOCKS, SCALES)))

    def _is_part(self, name: str) -> bool:
        return any(name.endswith(ending) and name.removesuffix(ending) in self._weights for ending in (BLOCKS, SCALES))

    def _dequantized(self, header: str) -> str:
        tensors = {}
        for name, entry in entries(header).items():
            weight = name.removesuffix(BLOCKS)
            if weight in self._weights and weight != name:
                num_experts, num_out, num_groups, num_bytes = entry.shape
                tensors[weight] = ("BF16", (num_experts, 2 * num_groups * num_bytes, num_out))
            elif not self._is_part(name):
                tensors[name] = (entry.code, entry.shape)
        return new_header(tensors, metadata(header))


def _told(entry: Entry | None) -> str:
    return "nowhere" if entry is None else f"{entry.code}{list(entry.shape)}"
