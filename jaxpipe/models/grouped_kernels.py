"""Triton kernels, written in Pallas, of the products of tiles with their experts' kernels; for NVIDIA GPUs.

Each block of threads makes one block of the result in float32 and writes it once. Neighbours share the block of
columns of one expert's kernel, and the rows of a few blocks, so that both come from the second level cache.
Sizes of blocks are powers of two that divide the arrays; nothing is masked, since tiles are filled up.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

# Rows and columns of a block of the result, and of what is multiplied at once. Three of the latter, each of 32 KiB, are
# on their way: 96 KiB of the 99 that a block of threads has at least, from compute capability 8.0 on.
MOST_ROWS, MOST_COLUMNS, MOST_DEPTH, STAGES = 128, 128, 64, 3
LEAST = 16  # of the product of a tensor core
NEIGHBOURS = 8  # blocks of rows that share a block of columns in the cache
OPTIONS = triton.CompilerParams(num_warps=8, num_stages=STAGES)


def fit(rows: jax.Array, kernels: jax.Array) -> bool:
    """Whether the kernels take "tile row in" and "expert in out": bfloat16, of sizes that 16 divides."""
    sizes = rows.shape[1], *kernels.shape[1:]
    return rows.dtype == jnp.bfloat16 and not any(size % LEAST for size in sizes)


def _block(size: int, most: int) -> int:
    """The largest power of two that divides `size`, `most` at most."""
    return min(size & -size, most)


def _place(index: jax.Array, num_rows: int, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """The block (row, column) of the result with `index`: a few rows by all columns, then the next rows.

    Example:
        >>> [tuple(map(int, _place(index, 9, 2))) for index in (0, 1, 8, 15, 16, 17)]
        [(0, 0), (1, 0), (0, 1), (7, 1), (8, 0), (8, 1)]
    """
    first = index // (NEIGHBOURS * num_columns) * NEIGHBOURS
    height = jnp.minimum(num_rows - first, NEIGHBOURS)
    within = index % (NEIGHBOURS * num_columns)
    return first + within % height, within // height


def products(
    rows: jax.Array, kernels: jax.Array, expert: jax.Array, *, transposed: bool = False, interpret: bool = False
) -> jax.Array:
    """Products "tile row out" of rows "tile row in"; zeros in tiles of no expert.

    Args:
        rows: "tile row in".
        kernels: "expert in out"; `transposed`: "expert out in".
        expert: int32 "tile"; the number of experts for a tile of none.
        transposed: see `kernels`.
        interpret: runs on any device, slowly.
    """
    (num_tiles, size, depth), num_experts = rows.shape, kernels.shape[0]
    width = kernels.shape[1 if transposed else 2]
    num_r, num_c, num_d = _block(size, MOST_ROWS), _block(width, MOST_COLUMNS), _block(depth, MOST_DEPTH)
    grid = num_tiles * size // num_r, width // num_c

    def block(expert_ref: Any, rows_ref: Any, kernels_ref: Any, out_ref: Any) -> None:
        row, column = _place(pl.program_id(0), *grid)
        tile, rows_at = row // (size // num_r), pl.ds(row % (size // num_r) * num_r, num_r)
        own, columns_at = expert_ref[tile], pl.ds(column * num_c, num_c)
        kernel = jnp.minimum(own, num_experts - 1)

        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            depth_at = pl.ds(turn * num_d, num_d)
            at = (kernel, columns_at, depth_at) if transposed else (kernel, depth_at, columns_at)
            return total + triton.dot(rows_ref[tile, rows_at, depth_at], kernels_ref[at], trans_b=transposed)

        turns = lax.convert_element_type(own < num_experts, jnp.int32) * (depth // num_d)
        total = lax.fori_loop(0, turns, add, jnp.zeros((num_r, num_c), jnp.float32))
        out_ref[tile, rows_at, columns_at] = total.astype(out_ref.dtype)

    return _call(block, (num_tiles, size, width), rows.dtype, math.prod(grid), interpret)(expert, rows, kernels)


def sums(rows: jax.Array, d: jax.Array, expert: jax.Array, *, num_experts: int, interpret: bool = False) -> jax.Array:
    """Sums "expert in out" of the products of each expert's rows "tile row in" with their gradients "tile row out".

    Args:
        rows: "tile row in".
        d: "tile row out".
        expert: int32 "tile", in order; `num_experts` for a tile of none.
        num_experts: experts.
        interpret: runs on any device, slowly.
    """
    (_, size, depth), width = rows.shape, d.shape[2]
    num_i, num_o, num_r = _block(depth, MOST_ROWS), _block(width, MOST_COLUMNS), _block(size, MOST_DEPTH)
    grid = depth // num_i, width // num_o
    first_tile = (expert < jnp.arange(num_experts + 1)[:, None]).sum(1, dtype=jnp.int32)

    def block(first_ref: Any, rows_ref: Any, d_ref: Any, out_ref: Any) -> None:
        own, index = pl.program_id(0) // math.prod(grid), pl.program_id(0) % math.prod(grid)
        i, o = _place(index, *grid)
        i_at, o_at = pl.ds(i * num_i, num_i), pl.ds(o * num_o, num_o)

        def add(turn: jax.Array, total: jax.Array) -> jax.Array:
            tile, rows_at = turn // (size // num_r), pl.ds(turn % (size // num_r) * num_r, num_r)
            return total + triton.dot(rows_ref[tile, rows_at, i_at], d_ref[tile, rows_at, o_at], trans_a=True)

        first, end = (first_ref[each] * (size // num_r) for each in (own, own + 1))
        total = lax.fori_loop(first, end, add, jnp.zeros((num_i, num_o), jnp.float32))
        out_ref[own, i_at, o_at] = total.astype(out_ref.dtype)

    call = _call(block, (num_experts, depth, width), rows.dtype, num_experts * math.prod(grid), interpret)
    return call(first_tile, rows, d)


def _call(block: Any, shape: tuple[int, ...], dtype: Any, num_blocks: int, interpret: bool) -> Any:
    out = jax.ShapeDtypeStruct(shape, dtype)
    options = None if interpret else OPTIONS
    return pl.pallas_call(block, out_shape=out, grid=(num_blocks,), interpret=interpret, compiler_params=options)
