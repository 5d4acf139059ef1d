"""MXFP4 weights of gpt-oss: each expert's weights as 4-bit numbers, 32 of which share a power of two.

A weight "expert out in" stands in two tensors: NAME_blocks, uint8 "expert out group byte", two numbers a byte, the
first in its low half; and NAME_scales, uint8 "expert out group", exponents plus 127. Ours and transformers' dequantized
weight is "expert in out". Every value is exact in bfloat16.
Source: OCP Microscaling Formats specification 1.0, sections 5.3 and 6.3; transformers, integrations/mxfp4.py,
`convert_moe_packed_tensors`.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.huggingface.tensor_files import Entry

BLOCKS = "_blocks"
SCALES = "_scales"
# Sign, two bits of exponent, one of mantissa: E2M1.
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BIAS = 127  # of the exponents, E8M0


def is_pair(blocks: Entry, scales: Entry) -> bool:
    """Whether each group of a weight has a scale."""
    return len(blocks.shape) == 4 and (blocks.shape[:-1], blocks.code) == (scales.shape, scales.code)


def shape_of(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a weight, "expert in out", from that of its blocks."""
    num_experts, num_out, num_groups, num_bytes = blocks
    return num_experts, 2 * num_groups * num_bytes, num_out


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
