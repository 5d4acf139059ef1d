"""FLOPs of matmuls with those of idle cores: a GPU computes results in tiles, and tiles in waves."""

from __future__ import annotations

from functools import cache

from jaxpipe.estimate.products import Matmul

# Rows and columns of a matmul's result that one core computes at once: the choices of cuBLAS except the smallest, to
# which the second level cache cannot bring numbers as fast as they are multiplied.
# Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799), section 2.3.
TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128))


@cache  # asked for by every setting of a plan
def padded_flops(matmul: Matmul, num_cores: int) -> int:
    """FLOPs that all cores could do in that time: in every wave each computes one full, partial or empty tile.

    Source: NVIDIA, Matrix Multiplication Background User's Guide (DU-09799), sections 3.1 and 3.2.

    Example:
        >>> padded_flops(Matmul(128, 128, 64), num_cores=1) == Matmul(128, 128, 64).flops
        True
        >>> matmul = Matmul(128, 160, 64)  # a tile of 128 and one of 64 columns, of which 32 are used
        >>> padded_flops(matmul, num_cores=1) / matmul.flops
        1.2
    """

    def padded(rows: int, columns: int) -> int:
        # Every tile computes whole, also where rows or columns end within it; so does the last wave.
        num_tiles = matmul.num * -(-matmul.rows // rows) * -(-matmul.columns // columns)
        return -(-num_tiles // num_cores) * num_cores * rows * columns

    return 2 * matmul.depth * min(padded(*tile) for tile in TILES)
