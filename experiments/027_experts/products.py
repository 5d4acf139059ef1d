"""FLOPs of the matrix products of experts in a compiled layer, against those that the chosen experts need.

Goes in: sizes, a way of dispatch, and devices, present or absent. A product is the experts' if one of its dims is their
width, which no other dim may equal. Loops count as often as they run.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxpipe.compile.hlo import Computation, Instruction, computations
from jaxpipe.mesh import make_mesh
from jaxpipe.models import LanguageModel, MixtureConfig
from jaxpipe.program.vjp import trace_vjp

_SIZES = re.compile(r"\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.\-]+)")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONTRACTED = re.compile(r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]"?(\d+)"?[}\]]')  # of HLO; of cuBLAS


def flops_with(text: str, size: int) -> int:
    """FLOPs of the products in optimized HLO that have a dim of `size`.

    Raises:
        ValueError: a loop without a known number of rounds, a product or a kernel that is not understood.
    """
    found, entry = computations(text)
    return _flops(found, found[entry], size)


def _flops(found: dict[str, Computation], computation: Computation, size: int) -> int:
    dims = {each.name: _dims(each.shape) for each in computation.instructions}
    total = 0
    for each in computation.instructions:
        if each.opcode == "dot" or "__cublas" in each.rest or "__onednn" in each.rest:
            total += _product(each, dims, size)
        if each.opcode == "custom-call" and "triton" in each.rest:
            total += _products_of_tiles(each, dims, size)
        inner = [_flops(found, found[name], size) for name in each.called if name in found]
        if each.opcode == "while" and any(inner):
            trips = _TRIP_COUNT.search(each.rest)
            if not trips:
                raise ValueError(f"it is not known how often the loop {each.name} runs")
            inner = [int(trips[1]) * flops for flops in inner]
        total += max(inner, default=0) if each.opcode == "conditional" else sum(inner)
    return total


def _product(product: Instruction, dims: dict[str, list[int]], size: int) -> int:
    left, right = (dims[name] for name in _OPERAND.findall(product.rest)[:2])
    contracted = _CONTRACTED.search(product.rest)
    if not contracted:
        raise ValueError(f"{product.name}: {product.rest} is not understood")
    flops = 2 * math.prod(_dims(product.shape)) * left[int(contracted[1])]
    return flops if size in (*left, *right) else 0


def _products_of_tiles(kernel: Instruction, dims: dict[str, list[int]], size: int) -> int:
    """Of a kernel of `jaxpipe.models.grouped_kernels`: of its arrays two are of the tiles' rows, "row ..."."""
    arrays = [*(dims[name] for name in _OPERAND.findall(kernel.rest) if name in dims), _dims(kernel.shape)]
    of_rows = [(a, b) for a, b in itertools.combinations(arrays, 2) if len(a) == len(b) == 2 and a[0] == b[0]]
    if len(of_rows) != 1:
        raise ValueError(f"{kernel.name}: {kernel.rest} is not understood")
    ((left, right),) = of_rows
    return 2 * math.prod(left) * right[1] if size in (left[1], right[1]) else 0


def _dims(shape: str) -> list[int]:
    """Dims of the first array of a shape."""
    sizes = _SIZES.search(shape)
    return [int(size) for size in sizes[1].split(",") if size] if sizes else []


def needed_flops(config: MixtureConfig, num_tokens: int) -> tuple[int, int]:
    """FLOPs of the chosen experts' three kernels in forward, and in backward, which has two products for each."""
    forward = 3 * 2 * num_tokens * config.experts_per_token * config.hidden * config.feed_forward
    return forward, 2 * forward


def compiled_flops(config: MixtureConfig, x: jax.ShapeDtypeStruct, device: Any) -> tuple[int, int]:
    """FLOPs of the experts' products in forward and backward of a layer, compiled for `device`.

    Args:
        config: config of the model.
        x: input of the layer, "batch seq hidden"; its dtype is that of the parameters, too.
        device: the device, which may be absent.
    """
    model, mesh = LanguageModel(config), make_mesh(devices=[device])
    layers = jax.eval_shape(model.init, jax.random.key(0))["layers"]
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], x.dtype), layers)
    given = {}, None
    vjp = trace_vjp(model.layer, params, x, *given)

    def flops(part: Callable, *arguments: Any) -> int:
        on_device = jax.shard_map(part, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        text = jax.jit(on_device).lower(*arguments, *given).compile().as_text()
        return flops_with(text or "", config.feed_forward)

    return flops(vjp.forward, params, x), flops(vjp.backward, params, list(vjp.residuals), vjp.y)
