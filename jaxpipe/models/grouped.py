"""Products of tiles of rows with the kernels of their experts, and the gradients of these products.

On GPUs, in bfloat16, Triton computes them (`grouped_kernels`). Elsewhere they are loops over the tiles, each iteration
one product with the kernel of one expert. On a GPU an iteration copies its expert's kernel, and small tiles leave most
cores idle: on an H100 loops reached 100 TFLOP/s with Mixtral's experts and 9 with Qwen3's, kernels 560 and 373
(2026-11-26).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as core
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from jaxpipe.mesh.abstract import is_estimated, stand_in
from jaxpipe.mesh.stacks import ADDED_IN_STACK, READ_IN_STACK
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
    return _bound(has_idle_tiles, rows, kernels, expert, transposed=False)


def _grouped_backward(
    has_idle_tiles: bool, saved: tuple[jax.Array, jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, expert = saved
    # Two calls and no common one, since a split backward computes the kernels' gradients later, in W.
    d_rows = _bound(has_idle_tiles, d, kernels, expert, transposed=True)
    params = {"num_experts": kernels.shape[0], "has_idle_tiles": has_idle_tiles}
    return d_rows, SUMS.bind(rows, d, expert, **params), None


_grouped.defvjp(
    lambda has_idle_tiles, rows, kernels, expert: (
        _grouped(has_idle_tiles, rows, kernels, expert),
        (rows, kernels, expert),
    ),
    _grouped_backward,
)


def _bound(
    has_idle_tiles: bool, rows: jax.Array, kernels: jax.Array, expert: jax.Array, *, transposed: bool
) -> jax.Array:
    params = {"num_experts": kernels.shape[0], "transposed": transposed, "has_idle_tiles": has_idle_tiles}
    return PRODUCTS.bind(rows, kernels, expert, jnp.zeros((), jnp.int32), **params)


# Primitives, so that the program can have kernels read, and gradients added, in place.
PRODUCTS = core.Primitive("grouped_products")  # (rows, kernels, expert, first kernel) -> products
SUMS = core.Primitive("grouped_sums")  # (rows, their gradients, expert) -> gradients of kernels
ADDED_SUMS = core.Primitive("grouped_sums_added")  # (totals, as above, first kernel) -> totals with these
READ_IN_STACK[PRODUCTS] = 1
ADDED_IN_STACK[SUMS] = ADDED_SUMS


def _products_like(rows: Any, kernels: Any, *others: Any, transposed: bool, **params: Any) -> Any:
    del others, params
    return rows.update(shape=(*rows.shape[:2], kernels.shape[1 if transposed else 2]))


def _sums_like(rows: Any, d: Any, expert: Any, *, num_experts: int, **params: Any) -> Any:
    del expert, params
    return rows.update(shape=(num_experts, rows.shape[2], d.shape[2]))


def _on_gpus(kernel: Callable, loop: Callable, kernels_of: Callable[..., tuple[Any, Any]]) -> Callable:
    """The kernel if rows and kernels fit it, those that `kernels_of` tells of its operands, else the loop."""

    def either(*arrays: jax.Array, has_idle_tiles: bool, **params: Any) -> jax.Array:
        if grouped_kernels.fit(*kernels_of(*arrays)):
            return kernel(*arrays, **params)
        return loop(*arrays, has_idle_tiles=has_idle_tiles, **params)

    return either


def _register(primitive: core.Primitive, like: Callable, *, loop: Callable, kernel: Callable) -> None:
    primitive.def_abstract_eval(like)
    primitive.def_impl(lambda *arrays, **params: jax.jit(partial(primitive.bind, **params))(*arrays))
    mlir.register_lowering(primitive, mlir.lower_fun(loop, multiple_results=False))
    mlir.register_lowering(primitive, mlir.lower_fun(kernel, multiple_results=False), platform="cuda")


# ---- For estimates: what both read and make, and what they multiply


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _estimated(num_rows: int, rows: jax.Array, kernels: jax.Array, expert: jax.Array) -> jax.Array:
    num, depth, width = kernels.shape
    like = jax.ShapeDtypeStruct((*rows.shape[:2], width), rows.dtype)
    return stand_in([like], [(num_rows, width, depth, num)], apart=kernels.size)(rows, kernels, expert)[0]


def _estimated_backward(
    num_rows: int, saved: tuple[jax.Array, jax.Array, jax.Array], d: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    rows, kernels, expert = saved
    num, depth, width = kernels.shape
    (d_rows,) = stand_in([rows], [(num_rows, depth, width, num)], apart=kernels.size)(d, kernels, expert)
    (d_kernels,) = stand_in([kernels], [(depth, width, num_rows, num)], apart=kernels.size)(rows, d, expert)
    return d_rows, d_kernels, None


_estimated.defvjp(lambda num_rows, *arrays: (_estimated(num_rows, *arrays), arrays), _estimated_backward)


# ---- Loops over tiles


def _products(
    rows: jax.Array,
    kernels: jax.Array,
    expert: jax.Array,
    first_kernel: jax.Array,
    *,
    num_experts: int,
    transposed: bool,
    has_idle_tiles: bool,
) -> jax.Array:
    def tile(_: None, tile_inputs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        rows, expert = tile_inputs
        like = jnp.zeros((rows.shape[0], kernels.shape[1 if transposed else 2]), rows.dtype)

        def product(kernel: jax.Array, _: jax.Array) -> jax.Array:
            return rows @ (kernel.T if transposed else kernel)

        return None, _if_used(product, kernels, expert, like, has_idle_tiles, num_experts, first_kernel)

    # A scan with one kernel at a time: a batched product would first gather a kernel for each tile.
    return lax.scan(tile, None, (rows, expert))[1]


def _sums(rows: jax.Array, d: jax.Array, expert: jax.Array, *, num_experts: int, has_idle_tiles: bool) -> jax.Array:
    """Sums "expert in out", made in float32, of products of tiles' rows with their gradients."""
    zeros = jnp.zeros((num_experts, rows.shape[-1], d.shape[-1]), jnp.float32)
    params = {"num_experts": num_experts, "has_idle_tiles": has_idle_tiles}
    return _added_sums(zeros, rows, d, expert, jnp.zeros((), jnp.int32), **params).astype(rows.dtype)


def _added_sums(
    totals: jax.Array,
    rows: jax.Array,
    d: jax.Array,
    expert: jax.Array,
    first_kernel: jax.Array,
    *,
    num_experts: int,
    has_idle_tiles: bool,
) -> jax.Array:
    def add(sums: jax.Array, tile_inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        rows, d, expert = tile_inputs

        def added(total: jax.Array, sums: jax.Array) -> jax.Array:
            # Float32 sums: an expert has as many terms as tiles, and bfloat16 loses the small ones.
            total = total + jnp.einsum("ri,ro->io", rows, d, preferred_element_type=jnp.float32)
            return lax.dynamic_update_index_in_dim(sums, total, _place(expert, num_experts, first_kernel), 0)

        return _if_used(added, sums, expert, sums, has_idle_tiles, num_experts, first_kernel), None

    return lax.scan(add, totals, (rows, d, expert))[0]


def _if_used(
    function: Callable[[jax.Array, jax.Array], jax.Array],
    of_experts: jax.Array,
    expert: jax.Array,
    otherwise: jax.Array,
    has_idle_tiles: bool,
    num_experts: int,
    first: jax.Array,
) -> jax.Array:
    """`function(of_experts[first + expert], otherwise)`, or `otherwise` for a tile of no expert."""

    def used(otherwise: jax.Array) -> jax.Array:
        at = _place(expert, num_experts, first)
        return function(lax.dynamic_index_in_dim(of_experts, at, 0, keepdims=False), otherwise)

    if not has_idle_tiles:
        return used(otherwise)
    # A branch and not zeros: over `mesh.expert` most tiles may be idle, and their products are the time to save.
    return lax.cond(expert < num_experts, used, lambda otherwise: otherwise, otherwise)


def _place(expert: jax.Array, num_experts: int, first: jax.Array) -> jax.Array:
    """Where the kernel of a tile's expert stands.

    A tile of no expert takes the last one, whose product with rows of zeros is zeros, and adds nothing to a sum.
    """
    return first + jnp.minimum(expert, num_experts - 1)


def _of_sums(rows: jax.Array, d: jax.Array, *others: jax.Array) -> tuple[Any, Any]:
    del others
    return rows, jax.ShapeDtypeStruct((1, rows.shape[2], d.shape[2]), rows.dtype)


_register(
    PRODUCTS,
    _products_like,
    loop=_products,
    kernel=_on_gpus(grouped_kernels.products, _products, lambda rows, kernels, *_: (rows, kernels)),
)
_register(SUMS, _sums_like, loop=_sums, kernel=_on_gpus(grouped_kernels.sums, _sums, _of_sums))
_register(
    ADDED_SUMS,
    lambda totals, *arrays, **params: totals,
    loop=_added_sums,
    kernel=_on_gpus(grouped_kernels.added_sums, _added_sums, lambda totals, *arrays: _of_sums(*arrays)),
)
