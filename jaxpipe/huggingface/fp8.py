"""FP8 weights of DeepSeek-V3: each block of 128 x 128 of a matrix "out in" shares one float32 scale.

NAME has the numbers, E4M3 with finite values alone, and NAME_scale_inv what they are multiplied by; blocks at the ends
of a matrix may be smaller. The products are rounded to float32.
Source: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; transformers, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxpipe.huggingface.tensor_files import Entry

BLOCK = 128
CODE = "F8_E4M3"
SCALES = "_scale_inv"


def is_pair(numbers: Entry, scales: Entry) -> bool:
    """Whether each block of a weight has a scale."""
    num_blocks = tuple(-(-size // BLOCK) for size in numbers.shape)
    return len(num_blocks) == 2 and (num_blocks, "F32") == (scales.shape, scales.code)


def dequantized(numbers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The weight "out in", float32, of the bytes of its numbers and of its scales, uint8 "out in" and "out in 4".

    Example:
        >>> numbers = np.array([[0x38, 0x40, 0xB8]], np.uint8)  # 1, 2, -1
        >>> dequantized(numbers, np.array([[0.5]], np.float32).view(np.uint8).reshape(1, 1, 4)).tolist()
        [[0.5, 1.0, -0.5]]
    """
    of_blocks = scales.view(np.float32)[..., 0]
    rows, columns = (np.arange(size) // BLOCK for size in numbers.shape)
    # NumPy itself has no such numbers.
    return numbers.view(jnp.float8_e4m3fn).astype(np.float32) * of_blocks[np.ix_(rows, columns)]
