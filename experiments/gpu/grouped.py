"""The products of a layer's experts with their tokens: ours, and the kernels for Hopper that JAX brings.

All do the same useful work: every token is multiplied with the kernels of as many experts as it is sent to. The
experts are chosen at random, each as often as any other. `jax.lax.ragged_dot` is left out: XLA makes one product over
all experts of it (jax 0.10.2 and 0.11.2, compiled for an H100), as much work again for each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu.cells import Cell, Part, Record, Size, compiled
from jaxpipe.models.dispatch import Capacity, Dispatch, Dropless, spread

# Name -> experts, those of a token, size of the stream, width of an expert.
SHAPES = {"Mixtral 8x7B": (8, 2, 4096, 14336), "Qwen3 30B-A3B": (128, 8, 2048, 768)}
NUM_TOKENS = 8192  # two sequences


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each shape and way to multiply."""
    for shape in SHAPES:
        for way in WAYS:
            if way == "Mosaic kernels" and not size.is_gpu:
                continue
            yield Cell(f"{shape}, {way}", partial(_products, size, shape, way))


PART = Part("grouped", "Products of experts", cells, minutes=3)

Product = Callable[..., jax.Array]  # (rows, kernels) -> products


def _ours(size: Size, shape: tuple[int, ...], dispatch: Dispatch) -> tuple[Product, tuple[jax.Array, jax.Array]]:
    """Our tiles, as `dispatch` cuts them."""
    num_experts, num_chosen, hidden, width = shape
    num_tokens = _num_tokens(size)
    rng = np.random.default_rng(0)
    chosen = rng.permuted(np.tile(np.arange(num_experts), (num_tokens, 1)), axis=1)[None, :, :num_chosen]
    tiles = jax.device_put(dispatch.tiles(jnp.asarray(chosen, jnp.int32)), size.device)
    rows = jax.jit(spread)(size.normal(rng, (num_tokens, hidden)), tiles)
    kernels = size.normal(rng, (num_experts, hidden, width), deviation=0.02)
    return lambda rows, kernels: dispatch.products(rows, kernels, tiles), (rows, kernels)


def _dropless(size: Size, shape: tuple[int, ...]) -> tuple[Product, tuple[jax.Array, jax.Array]]:
    return _ours(size, shape, Dropless(shape[0], shape[1]))


def _capacity(size: Size, shape: tuple[int, ...]) -> tuple[Product, tuple[jax.Array, jax.Array]]:
    return _ours(size, shape, Capacity(shape[0], shape[1], 1.0))


def _mosaic(size: Size, shape: tuple[int, ...]) -> tuple[Product, tuple[jax.Array, jax.Array]]:
    """The kernels for Hopper that JAX brings as examples, of sorted rows."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    num_experts, num_chosen, hidden, width = shape
    rng, num_rows = np.random.default_rng(0), _num_tokens(size) * num_chosen
    lengths = rng.multinomial(num_rows, [1 / num_experts] * num_experts).astype(np.int32)
    rows = size.normal(rng, (num_rows, hidden))
    kernels = size.normal(rng, (num_experts, hidden, width), deviation=0.02)
    blocks: dict[str, int] = {"block_m": 128, "block_n": 128, "block_k": 64}
    blocks |= {"max_concurrent_steps": 4, "grid_block_n": 4}
    common = {"group_sizes": jax.device_put(lengths, size.device), **blocks}

    @jax.custom_vjp
    def product(rows: jax.Array, kernels: jax.Array) -> jax.Array:
        return ragged_dot(rows, kernels, **common)

    def backward(saved: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows, kernels = saved
        return ragged_dot(d, kernels, transpose_rhs=True, **common), transposed_ragged_dot(rows, d, **common)

    product.defvjp(lambda *arrays: (product(*arrays), arrays), backward)
    return product, (rows, kernels)


WAYS: dict[str, Callable[[Size, tuple[int, ...]], tuple[Product, tuple[jax.Array, jax.Array]]]] = {
    "dropless": _dropless,
    "capacity, one batched product": _capacity,
    "Mosaic kernels": _mosaic,
}


def _num_tokens(size: Size) -> int:
    return 256 if size.quick else NUM_TOKENS


def _products(size: Size, name: str, way: str) -> Record:
    """Milliseconds of the product, and of those of its two gradients."""
    shape = (4, 2, 64, 128) if size.quick else SHAPES[name]
    product, (rows, kernels) = WAYS[way](size, shape)
    forward = compiled(product, rows, kernels)
    d = forward()

    def gradients(rows: jax.Array, kernels: jax.Array, d: jax.Array) -> Any:
        return jax.vjp(product, rows, kernels)[1](d)

    backward = compiled(gradients, rows, kernels, d)
    forward_s, backward_s = size.seconds(forward, backward)
    _, num_chosen, hidden, width = shape
    flops = 2 * _num_tokens(size) * num_chosen * hidden * width
    return {
        "ms": {"F": 1e3 * forward_s, "B": 1e3 * backward_s},
        "tflop_per_s": {"F": flops / forward_s / 1e12, "B": 2 * flops / backward_s / 1e12},
        "apart": max(_apart(rows, kernels, d, transposed=False), _apart(d, kernels, backward()[0], transposed=True)),
    }


def _apart(rows: jax.Array, kernels: jax.Array, product: jax.Array, *, transposed: bool) -> float:
    """How far the first rows, which are the first expert's, are from their product: of the largest number."""
    first, found = (each[0] if each.ndim == 3 else each[:128] for each in (rows, product))
    kernel = kernels[0].T if transposed else kernels[0]
    plain = np.asarray(jnp.matmul(first, kernel, preferred_element_type=jnp.float32))
    return float(np.abs(np.asarray(found, np.float32) - plain).max() / np.abs(plain).max())
