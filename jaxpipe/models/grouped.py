"""Products of tiles of rows with the kernels of their experts, and the gradients of these products.

On GPUs, in bfloat16, Triton computes them (`grouped_kernels`). Elsewhere they are loops over the tiles, each iteration
one product with the kernel of one expert. On a GPU an iteration copies its expert's kernel, and small tiles leave most
cores idle: on an H100 loops reached 100 TFLOP/s with Mixtral's experts and 9 with Qwen3's, kernels 560 and 373
(2026-11-26).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh.abstract import is_estimated, stand_in
from jaxpipe.models import grouped_kernels


def grouped(
    rows: jax.Array, kernels: jax.Array, expert: jax.Array, has_idle_tiles: bool, *, num_rows: int = 0
) -> jax.Array:
    """Products "tile row out" of tiles with their experts' kernels.

    Args:
        rows: "tile row in"; zeros in tiles of no expert.
        kernels: "expert in out".
        expert: int32 "tile", in order; the number of experts for a tile of none.
        has_idle_tiles: whether most tiles may have no expert, as over `mesh.expert`: then loops skip them.
        num_rows: rows of an expert where all have as many, of which estimates count the work.
    """
    if is_estimated():
        return _estimated(num_rows, rows, kernels, expert)
    return _grouped(has_idle_tiles, rows, kernels, expert)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(has_idle_tiles: bool, rows: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    return _by_platform(
        grouped_kernels.products, partial(_products, has_idle_tiles), grouped_kernels.fit(rows, kernels)
    )(rows, kernels, expert)


def _grouped_backward(
    has_idle_tiles: bool, saved: tuple[jax.Array, jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, expert = saved
    fits = grouped_kernels.fit(rows, kernels)
    # Two calls and no common one, since a split backward computes the kernels' gradients later, in W.
    kernel, loop = (partial(function, transposed=True) for function in (grouped_kernels.products, _products))
    d_rows = _by_platform(kernel, partial(loop, has_idle_tiles), fits)(d, kernels, expert)
    kernel, loop = (partial(function, num_experts=kernels.shape[0]) for function in (grouped_kernels.sums, _sums))
    return d_rows, _by_platform(kernel, partial(loop, has_idle_tiles), fits)(rows, d, expert), None


_grouped.defvjp(
    lambda has_idle_tiles, rows, kernels, expert: (
        _grouped(has_idle_tiles, rows, kernels, expert),
        (rows, kernels, expert),
    ),
    _grouped_backward,
)


def _by_platform(kernel: Callable, loop: Callable, fits: bool) -> Callable:
    """The kernel on NVIDIA GPUs if the arrays fit it, else the loop."""
    return partial(lax.platform_dependent, cuda=kernel, default=loop) if fits else loop


# ---- For estimates: what both read and make, and what they multiply


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _estimated(num_rows: int, rows: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    num, depth, width = kernels.shape
    like = jax.ShapeDtypeStruct((*rows.shape[:2], width), rows.dtype)
    return stand_in([like], [(num_rows, width, depth, num)])(rows, kernels, expert)[0]


def _estimated_backward(
    num_rows: int, saved: tuple[jax.Array, jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, expert = saved
    num, depth, width = kernels.shape
    (d_rows,) = stand_in([rows], [(num_rows, depth, width, num)])(d, kernels, expert)
    (d_kernels,) = stand_in([kernels], [(depth, width, num_rows, num)])(rows, d, expert)
    return d_rows, d_kernels, None


_estimated.defvjp(lambda num_rows, *arrays: (_estimated(num_rows, *arrays), arrays), _estimated_backward)


# ---- Loops over tiles


def _products(
    has_idle_tiles: bool, rows: jax.Array, kernels: jax.Array, expert: jax.Array, *, transposed: bool = False
) -> jax.Array:
    def tile(_: None, tile_inputs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        rows, expert = tile_inputs
        like = jnp.zeros((rows.shape[0], kernels.shape[1 if transposed else 2]), rows.dtype)

        def product(kernel: jax.Array, _: jax.Array) -> jax.Array:
            return rows @ (kernel.T if transposed else kernel)

        return None, _if_used(product, kernels, expert, like, has_idle_tiles)

    # A scan with one kernel at a time: a batched product would first gather a kernel for each tile.
    return lax.scan(tile, None, (rows, expert))[1]


def _sums(has_idle_tiles: bool, rows: jax.Array, d: jax.Array, expert: jax.Array, *, num_experts: int) -> jax.Array:
    """Sums "expert in out", made in float32, of products of tiles' rows with their gradients."""

    def add(sums: jax.Array, tile_inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, d, expert = tile_inputs

        def added(total: jax.Array, sums: jax.Array) -> jax.Array:
            # Float32 sums: an expert has as many terms as tiles, and bfloat16 loses the small ones.
            total = total + jnp.einsum("ri,ro->io", rows, d, preferred_element_type=jnp.float32)
            return lax.dynamic_update_index_in_dim(sums, total, expert, 0)

        return _if_used(added, sums, expert, sums, has_idle_tiles), None

    shape = (num_experts, rows.shape[-1], d.shape[-1])
    return lax.scan(add, jnp.zeros(shape, jnp.float32), (rows, d, expert))[0].astype(rows.dtype)


def _if_used(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    of_experts: jax.Array,
    expert: jax.Array,
    otherwise: jax.Array,
    has_idle_tiles: bool,
) -> jax.Array:
    """`function(of_experts[expert], otherwise)`, or `otherwise` for a tile of no expert."""

    def used(otherwise: jax.Array) -> jax.Array:
        # The index of a tile of no expert is clamped to the last expert, whose product with rows of zeros is zeros,
        # and adds nothing to a sum.
        return function(lax.dynamic_index_in_dim(of_experts, expert, 0, keepdims=False), otherwise)

    if not has_idle_tiles:
        return used(otherwise)
    # A branch and not zeros: over `mesh.expert` most tiles may be idle, and their products are the time to save.
    return lax.cond(expert < of_experts.shape[0], used, lambda otherwise: otherwise, otherwise)
