"""Triton kernels, written in Pallas, of the products of tiles with their experts' kernels; for NVIDIA GPUs.

Each block of threads makes one block of the result in float32 and writes it once. Neighbours share the block of
columns of one expert's kernel, and the rows of a few blocks, so that both come from the second level cache.
A block has rows of one expert, of several tiles where tiles are small; rows that are not the expert's are masked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxpipe.cluster.hardware import Hardware, with_such_cores

# Rows and columns of a block of the result, and of what is multiplied at once; chosen on an H100.
MOST_ROWS = 128
MOST_COLUMNS = 256
MOST_DEPTH = 64
STAGE_BYTES = 2 * (MOST_ROWS + MOST_COLUMNS) * MOST_DEPTH  # of both factors, in bfloat16
MOST_STAGES = 3  # that are on their way at once
LEAST = 16  # of the product of a tensor core
NEIGHBOURS = 8  # blocks of rows that share a block of columns in the cache
NUM_WARPS = 8


def fit(rows: jax.Array, kernels: jax.Array) -> bool:
    """Whether the kernels take "tile row in", "expert in out": bfloat16, widths that 16 divides, 16 rows at least."""
    has_rows = rows.shape[0] * rows.shape[1] >= LEAST
    return rows.dtype == jnp.bfloat16 and has_rows and not any(size % LEAST for size in kernels.shape[1:])


def _block(size: int, most: int) -> int:
    """The largest power of two that divides `size`, `most` at most."""
    # `size & -size` is the lowest bit that is set, the largest power of two that divides.
    return min(size & -size, most)


def _place(index: jax.Array, num_rows: int, num_columns: int) -> tuple[jax.Array, jax.Array]:
    """The block (row, column) of the result with `index`: a few rows by all columns, then the next rows.

    Example:
        >>> [tuple(map(int, _place(index, 9, 2))) for index in (0, 1, 8, 15, 16, 17)]
        [(0, 0), (1, 0), (0, 1), (7, 1), (8, 0), (8, 1)]
    """
    first = index // (NEIGHBOURS * num_columns) * NEIGHBOURS
    # The last group may have fewer rows of blocks.
    height = jnp.minimum(num_rows - first, NEIGHBOURS)
    within = index % (NEIGHBOURS * num_columns)
    return first + within % height, within // height


def _first_rows(expert: jax.Array, num_experts: int, size: int) -> jax.Array:
    """The first row of each expert's tiles, of those of no expert, and the number of rows: int32 "expert + 2"."""
    # + 2: an entry for tiles of no expert, and one for the end.
    return size * (expert < jnp.arange(num_experts + 2)[:, None]).sum(1, dtype=jnp.int32)


def _blocks_of_rows(first: jax.Array, num: int, num_r: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The expert of each of `num` blocks of `num_r` rows, its first row and the row after its last.

    A block has rows of one expert. The last ones have none.

    Example:
        >>> expert, first, end = _blocks_of_rows(jnp.array([0, 48, 64, 64]), 4, 32)
        >>> expert.tolist(), first.tolist(), end.tolist()
        ([0, 0, 1, 3], [0, 32, 48, 64], [32, 48, 64, 64])
    """
    # Rounded up: the last block of an expert may have rows of the next, which are masked.
    end_block = jnp.cumsum(-(-jnp.diff(first) // num_r))
    block = jnp.arange(num)
    expert = (block[:, None] >= end_block).sum(1, dtype=jnp.int32)
    # Exclusive sums: how many blocks stand before the first of an expert.
    place = block - jnp.append(0, end_block)[expert]
    # Blocks beyond all experts' begin at the end, with no rows.
    begin = jnp.minimum(first[expert] + num_r * place, first[-1])
    # Appended, since `expert + 1` is one beyond `first` for these last blocks.
    return expert, begin, jnp.minimum(begin + num_r, jnp.append(first, first[-1])[expert + 1])


def products(
    rows: jax.Array,
    kernels: jax.Array,
    expert: jax.Array,
    first_kernel: jax.Array | int = 0,
    *,
    num_experts: int,
    transposed: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Products "tile row out" of rows "tile row in"; zeros in tiles of no expert.

    Args:
        kernels: "kernel in out"; `transposed`: "kernel out in".
        expert: int32 "tile", in order; the number of experts for a tile of none.
        first_kernel: the place of the first expert's kernel.
        num_experts: those that have kernels from there on.
        interpret: runs on any device, slowly.
    """
    num_tiles, size, depth = rows.shape
    width = kernels.shape[1 if transposed else 2]
    num_rows = num_tiles * size
    # Triton takes powers of two alone; this is the largest that is not above `num_rows`.
    num_r = min(1 << num_rows.bit_length() - 1, MOST_ROWS)
    num_c = _block(width, MOST_COLUMNS)
    num_d = _block(depth, MOST_DEPTH)
    # An expert's rows are a multiple of `size`, so its last block has `num_r - gcd` rows too many at most; so do the
    # rows of no expert.
    num_blocks = (num_rows + (num_experts + 1) * (num_r - math.gcd(num_r, size))) // num_r
    grid = num_blocks, width // num_c
    of_block, *ends = _blocks_of_rows(_first_rows(expert, num_experts, size), num_blocks, num_r)
    kernel_of_block = jnp.where(of_block < num_experts, first_kernel + of_block, -1)

    def block(kernel_ref: Any, begin_ref: Any, end_ref: Any, rows_ref: Any, kernels_ref: Any, out_ref: Any) -> None:
        row, column = _place(pl.program_id(0), *grid)
        kernel_here = kernel_ref[row]
        begin = begin_ref[row]
        end = end_ref[row]
        # Triton reads a whole block: it begins so early that it ends within the array, and rows before `begin` are
        # masked.
        first = jnp.minimum(begin, num_rows - num_r)
        columns_at = pl.ds(column * num_c, num_c)
        rows_at = pl.ds(first, num_r)
        # In range also for a block of no expert, which reads nothing but still forms the address.
        kernel = jnp.maximum(kernel_here, 0)

        def add(iteration: jax.Array, total: jax.Array) -> jax.Array:
            depth_at = pl.ds(iteration * num_d, num_d)
            at = (kernel, columns_at, depth_at) if transposed else (kernel, depth_at, columns_at)
            return total + triton.dot(rows_ref[rows_at, depth_at], kernels_ref[at], trans_b=transposed)

        # No iteration for a block of no expert: its total is zeros, which must be written, since the result has no
        # first value.
        num_iterations = lax.convert_element_type(kernel_here >= 0, jnp.int32) * (depth // num_d)
        total = lax.fori_loop(0, num_iterations, add, jnp.zeros((num_r, num_c), jnp.float32))
        is_within = _within(first, num_r, begin, end)[:, None]
        # The mask keeps rows of a neighbouring expert, which another block writes.
        triton.store(out_ref.at[rows_at, columns_at], total.astype(out_ref.dtype), mask=is_within)

    call = _call(block, (num_rows, width), rows.dtype, math.prod(grid), interpret)
    return call(kernel_of_block, *ends, rows.reshape(num_rows, depth), kernels).reshape(num_tiles, size, width)


def sums(
    rows: jax.Array,
    d: jax.Array,
    expert: jax.Array,
    *,
    num_experts: int,
    totals: jax.Array | None = None,
    first_kernel: jax.Array | int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Sums "expert in out" of the products of each expert's rows "tile row in" with their gradients "tile row out".

    Args:
        expert: int32 "tile", in order; `num_experts` for a tile of none.
        totals: float32 "kernel in out", to which the sums are added in place; they are returned then.
        first_kernel: the place of the first expert's kernel there.
        interpret: runs on any device, slowly.
    """
    num_tiles, size, depth = rows.shape
    width = d.shape[2]
    num_rows = num_tiles * size
    num_i = _block(depth, MOST_ROWS)
    num_o = _block(width, MOST_COLUMNS)
    # A power of two, as in `products`.
    num_r = min(1 << num_rows.bit_length() - 1, MOST_DEPTH)
    grid = depth // num_i, width // num_o

    def block(first_ref: Any, kernel_ref: Any, rows_ref: Any, d_ref: Any, *totals_ref: Any) -> None:
        out_ref = totals_ref[-1]
        expert_here = pl.program_id(0) // math.prod(grid)
        index = pl.program_id(0) % math.prod(grid)
        i, o = _place(index, *grid)
        i_at = pl.ds(i * num_i, num_i)
        o_at = pl.ds(o * num_o, num_o)
        begin = first_ref[expert_here]
        end = first_ref[expert_here + 1]

        def add(iteration: jax.Array, total: jax.Array) -> jax.Array:
            begin_rows = begin + iteration * num_r
            # As in `products`: the block ends within the array.
            first = jnp.minimum(begin_rows, num_rows - num_r)
            rows_at = pl.ds(first, num_r)
            is_within = _within(first, num_r, begin_rows, end)[:, None]

            def own_rows(ref: Any, at: Any) -> jax.Array:
                if size % num_r == 0:  # A block begins and ends with tiles, so all rows are the expert's.
                    return ref[rows_at, at]
                # Both factors are masked: what lies in a row of another expert may be NaN, and NaN times 0 is NaN.
                return triton.load(ref.at[rows_at, at], mask=is_within, other=0.0)

            return total + triton.dot(own_rows(rows_ref, i_at), own_rows(d_ref, o_at), trans_a=True)

        # Rounded up; an expert without rows iterates never and gets a sum of zeros.
        num_iterations = (end - begin + num_r - 1) // num_r
        total = lax.fori_loop(0, num_iterations, add, jnp.zeros((num_i, num_o), jnp.float32))
        at = kernel_ref[0] + expert_here, i_at, o_at
        # The totals are the result: what stands there is read where it is then written.
        out_ref[at] = total.astype(out_ref.dtype) if totals is None else totals_ref[0][at] + total

    of_rows = (array.reshape(num_rows, array.shape[2]) for array in (rows, d))
    inputs = [_first_rows(expert, num_experts, size), jnp.full(1, first_kernel, jnp.int32), *of_rows]
    num_blocks = num_experts * math.prod(grid)
    if totals is None:
        return _call(block, (num_experts, depth, width), rows.dtype, num_blocks, interpret)(*inputs)
    aliases = {len(inputs): 0}
    return _call(block, totals.shape, totals.dtype, num_blocks, interpret, aliases)(*inputs, totals)


def added_sums(
    totals: jax.Array, rows: jax.Array, d: jax.Array, expert: jax.Array, first_kernel: jax.Array, **options: Any
) -> jax.Array:
    """`totals` with `sums` added."""
    return sums(rows, d, expert, totals=totals, first_kernel=first_kernel, **options)


def _within(first: jax.Array, number: int, begin: jax.Array, end: jax.Array) -> jax.Array:
    """Which of `number` rows from `first` on are among `begin` to `end`."""
    row = first + jnp.arange(number)
    return (row >= begin) & (row < end)


def _call(
    block: Any,
    shape: tuple[int, ...],
    dtype: Any,
    num_blocks: int,
    interpret: bool,
    aliases: Mapping[int, int] = MappingProxyType({}),
) -> Any:
    options = None if interpret else triton.CompilerParams(num_warps=NUM_WARPS, num_stages=num_stages(_hardware()))
    out = jax.ShapeDtypeStruct(shape, dtype)
    of_grid = {"grid": (num_blocks,), "input_output_aliases": dict(aliases)}
    return pl.pallas_call(block, out_shape=out, interpret=interpret, compiler_params=options, **of_grid)


def num_stages(hardware: Hardware | None) -> int:
    """How many pairs of factors are on their way: as many as the shared memory of `hardware` has room for.

    Example:
        >>> from jaxpipe.cluster.hardware import HARDWARE
        >>> num_stages(HARDWARE["a100-80g"]), num_stages(HARDWARE["l40s"]), num_stages(None)
        (3, 2, 2)
    """
    of_block = hardware.shared_memory_per_block_bytes if hardware else 0
    # At least two: one pair is read while the other is multiplied.
    return max(2, min(of_block // STAGE_BYTES, MOST_STAGES))


def _hardware() -> Hardware | None:
    """The kind of GPU that is compiled for, which need not be there; None if it is not known."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return with_such_cores(device.device_kind)
