"""Norms and matmuls of a layer over the `tensor` axis, written so that backward saves as little as possible.

The residual stream is split along the sequence. A matmul from the stream first gathers the sequence and holds some
columns of its kernel; one back to the stream holds the rows for these columns, and its terms are summed while the
sequence is split again. Arrays that are cheap to compute from the saved ones (norms, activations, the gathered
sequence) are recomputed in backward. Norms take their statistics in float32.
Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, section 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxpipe.mesh import TensorAxis
from jaxpipe.models.lora import Adapter, Columns, Lora


@dataclass(frozen=True)
class Normalize:
    """The pure function of a norm."""

    epsilon: float  # added to the variance
    centered: bool  # whether the mean is subtracted first

    def __call__(self, x: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        """`x` normalized over its last dim, times `arrays["scale"]`, plus `arrays["bias"]` if there is one."""
        x32 = x.astype(jnp.float32)
        if self.centered:
            x32 = x32 - x32.mean(axis=-1, keepdims=True)
        # Of differences from the mean: the mean of squares less the squared mean would cancel most digits.
        variance = (x32 * x32).mean(axis=-1, keepdims=True)
        # Scaled in float32 and rounded once, in the next line.
        y = x32 * jax.lax.rsqrt(variance + self.epsilon) * arrays["scale"]
        return (y + arrays["bias"] if "bias" in arrays else y).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1 over `hidden`, then scaled and shifted; source: Ba et al. 2016."""

    def __init__(self, hidden: int, *, epsilon: float = 1e-5):
        self.scale = nnx.Param(jnp.ones(hidden))
        self.bias = nnx.Param(jnp.zeros(hidden))
        self.apply = Normalize(epsilon, centered=True)

    def arrays(self) -> dict[str, jax.Array]:
        """Arrays of the norm: {"scale", "bias"}."""
        return {"scale": self.scale[...], "bias": self.bias[...]}


class RMSNorm(nnx.Module):
    """Mean square 1 over `hidden`, then scaled; source: Zhang and Sennrich, NeurIPS 2019."""

    def __init__(self, hidden: int, *, epsilon: float = 1e-5):
        self.scale = nnx.Param(jnp.ones(hidden))
        self.apply = Normalize(epsilon, centered=False)

    def arrays(self) -> dict[str, jax.Array]:
        """Arrays of the norm: {"scale"}."""
        return {"scale": self.scale[...]}


def initial_deviation(hidden: int) -> float:
    """Standard deviation of initial kernels and embeddings: 0.02 for GPT-2's 768, more for smaller models.

    Source: Nguyen and Salazar, Transformers without Tears, IWSLT 2019, section 2.2 (SmallNorm).
    """
    return (2 / (5 * hidden)) ** 0.5


def output_deviation(hidden: int, num_layers: int) -> float:
    """The same of kernels back to the stream, as GPT-2's and Megatron's: smaller by sqrt(2 * num_layers)."""
    # Each layer adds to the stream twice: scaled so, all additions together have the variance of one.
    return initial_deviation(hidden) / (2 * num_layers) ** 0.5


class Linear(nnx.Module):
    """A kernel "in out" and, unless left out, a bias "out"; `split` is the kernel's dim split over `tensor`, if any.

    Args:
        lora: adapters of the model; None: there are none.
        parts: name of each part of the columns that may have an adapter of its own, and its columns in each group; a
            kernel of one part has one group.
    """

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        split: int | None,
        bias: bool,
        deviation: float,
        lora: Lora | None = None,
        parts: Sequence[tuple[str, int]] = (),
        rngs: nnx.Rngs,
    ):
        key = rngs.params()
        kernel = deviation * jax.random.normal(key, (num_inputs, num_outputs))
        self.kernel = nnx.Param(kernel, split=split)
        self.columns = None
        targets = [name for name, _ in parts if lora and lora.is_target(name)]
        if lora and targets:
            names, widths = zip(*parts, strict=True)
            self.columns = Columns(names, widths if len(parts) > 1 else None, lora.scale)
            group = sum(widths)
            for i, (name, width) in enumerate(parts):
                if name in targets:
                    size = num_outputs // group * width
                    # From the kernel's key: with adapters all other parameters begin with the values that they have
                    # without.
                    of_adapter = jax.random.fold_in(key, i)
                    setattr(self, name, Adapter(num_inputs, size, rank=lora.rank, split=split, key=of_adapter))
        if bias:
            # A bias of rows is added after the sum over `tensor`, so every device has it whole.
            self.bias = nnx.Param(jnp.zeros(num_outputs), split=0 if split == 1 else None)

    def arrays(self) -> dict[str, jax.Array]:
        """Arrays of the matmul: {"kernel"}; if there are, "bias", and "adapters", A and B by the name of their part."""
        arrays: dict[str, Any] = {name: getattr(self, name)[...] for name in ("kernel", "bias") if hasattr(self, name)}
        if self.columns:
            arrays["adapters"] = {
                name: getattr(self, name).arrays() for name in self.columns.names if hasattr(self, name)
            }
        return arrays

    def __call__(self, x: jax.Array) -> jax.Array:
        """Matmul "... out" with `x` "... in", on each device separately."""
        arrays = self.arrays()
        return _add_bias(times(x, arrays["kernel"]), arrays)


def from_stream(x: jax.Array, norm: Any, linears: tuple[Linear, ...], tensor: TensorAxis) -> tuple[jax.Array, ...]:
    """Matmuls of the normed stream with `linears` that are split by columns; backward saves `x` alone.

    Args:
        x: "batch local_seq hidden".
        norm: a module with `arrays()` and a static `apply(x, arrays)`.

    Returns:
        "batch seq local_out" for each of `linears`.
    """
    columns = tuple(linear.columns for linear in linears)
    return _from_stream(norm.apply, tensor, columns, x, norm.arrays(), tuple(linear.arrays() for linear in linears))


def to_stream(activation: Callable, inputs: tuple[jax.Array, ...], linear: Linear, tensor: TensorAxis) -> jax.Array:
    """Matmul of `activation(*inputs)` with `linear` that is split by rows; backward saves `inputs` alone.

    Args:
        activation: elementwise or a reshape, to "batch seq local_in".

    Returns:
        "batch local_seq out".
    """
    arrays = linear.arrays()
    # The bias comes after the sum: before it, it would be added once for each device.
    of_product = {name: array for name, array in arrays.items() if name != "bias"}
    return _add_bias(tensor.scatter_sum(_to_stream(activation, linear.columns, inputs, of_product), 1), arrays)


# prevent_cse=False: a layer's forward and backward are never in one loop body, so nothing can be merged.
@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1, 2))
def _from_stream(
    norm: Callable,
    tensor: TensorAxis,
    columns: Sequence[Columns | None],
    x: jax.Array,
    norm_arrays: Any,
    linears: Any,
) -> Any:
    whole = tensor.gather(norm(x, norm_arrays), 1)
    products = _products(whole, columns, linears)
    return tuple(_add_bias(product, arrays) for product, arrays in zip(products, linears, strict=True))


@partial(jax.checkpoint, prevent_cse=False, static_argnums=(0, 1))
def _to_stream(activation: Callable, columns: Columns | None, inputs: tuple[jax.Array, ...], arrays: Any) -> jax.Array:
    return _products(activation(*inputs), (columns,), (arrays,))[0]


def _products(x: jax.Array, columns: Sequence[Columns | None], linears: Any) -> list[jax.Array]:
    """`x` times the kernel of each of `linears`, with what its adapters add."""
    products = [times(x, arrays["kernel"]) for arrays in linears]
    pairs = [pair for arrays in linears for pair in arrays.get("adapters", {}).values()]
    if not pairs:
        return products
    # One product for all of them, which read the same `x`: one alone is too narrow for a GPU's tensor cores.
    low = times(x, jnp.concatenate([a for a, _ in pairs], axis=1))
    ends = np.cumsum([a.shape[1] for a, _ in pairs])[:-1]
    by_pair = iter(jnp.split(low, ends, axis=-1))
    for i, (of, arrays) in enumerate(zip(columns, linears, strict=True)):
        if of:
            added = {name: times(of.scale * next(by_pair), b) for name, (_, b) in arrays["adapters"].items()}
            products[i] = products[i] + of.joined(added)
    return products


def times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x @ kernel` with all tokens in one dim, so that XLA transposes no input of the kernel's gradient."""
    return (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], -1)


def add(x: jax.Array, term: jax.Array) -> jax.Array:
    """`x` plus a broadcast `term`, added in float32: the gradient of `term` is then a float32 sum on every GPU."""
    return (x.astype(jnp.float32) + term.astype(jnp.float32)).astype(x.dtype)


def _add_bias(y: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
    """Returns `y` plus `arrays["bias"]` if there is one.

    In float32 also so that XLA adds it where `y` is used: a bias that a GPU's matmul adds itself keeps the
    matmul from reading its kernel as a slice of all layers' kernels, and the kernel would be copied.
    """
    return add(y, arrays["bias"]) if "bias" in arrays else y
