"""A transformer block as one writes it in PyTorch, with our block's weights, and how far the two are apart.

On a GPU it is compiled, and its attention takes the flash kernels. Needs torch (2.11 and 2.13.0 were tried).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.gpu.cells import Size
from jaxpipe.models import GPTConfig, LanguageModel, LlamaConfig
from jaxpipe.program.vjp import trace_vjp

MOST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Case:
    """One block.

    Attributes:
        model: without dropout.
        batch: sequences.
        seq_len: tokens of each.
        dtype: "float32" or "bfloat16".
        platform: "cpu" or "gpu".
    """

    model: GPTConfig | LlamaConfig
    batch: int
    seq_len: int
    dtype: str
    platform: str


class TorchAttention(nn.Module):
    """What attention adds to the stream; columns by key-value head: its queries, its key, its value."""

    def __init__(self, case: Case):
        super().__init__()
        model = case.model
        self.head_size = model.hidden // model.num_heads
        self.num_kv_heads = getattr(model, "num_kv_heads", model.num_heads)
        num_columns = (model.num_heads + 2 * self.num_kv_heads) * self.head_size
        has_bias = isinstance(model, GPTConfig)
        self.norm = new_norm(model)
        self.query_key_value = nn.Linear(model.hidden, num_columns, bias=has_bias)
        self.output = nn.Linear(model.hidden, model.hidden, bias=has_bias)
        self.rotates = isinstance(model, LlamaConfig)
        if isinstance(model, LlamaConfig):
            position = torch.arange(case.seq_len, dtype=torch.float32)
            assert model.rope_scaling is None  # as in Llama 3, and not in 3.1
            angle = torch.outer(position, frequencies(self.head_size, model.rope_theta))
            # No buffers, which would be cast with the weights: positions need more digits than bfloat16 has.
            self.cos, self.sin = angle.cos().to(device_of(case)), angle.sin().to(device_of(case))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to "batch seq hidden"."""
        batch, seq_len, hidden = x.shape
        columns = self.query_key_value(self.norm(x))
        by_group = columns.view(batch, seq_len, self.num_kv_heads, -1, self.head_size)
        query = by_group[..., :-2, :].reshape(batch, seq_len, -1, self.head_size).transpose(1, 2)
        key, value = by_group[..., -2, :].transpose(1, 2), by_group[..., -1, :].transpose(1, 2)
        if self.rotates:
            query, key = self._rotate(query), self._rotate(key)
        has_groups = self.num_kv_heads < query.shape[1]
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=has_groups)
        return self.output(attended.transpose(1, 2).reshape(batch, seq_len, hidden))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, dim=-1)
        rotated = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(rotated, dim=-1).to(x.dtype)


def frequencies(head_size: int, theta: float) -> torch.Tensor:
    """By how much each plane of a head turns from one position to the next, in radians."""
    planes = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    return (theta**-planes).float()


class TorchFeedForward(nn.Module):
    """What the feed forward adds to the stream."""

    def __init__(self, model: GPTConfig | LlamaConfig):
        super().__init__()
        self.norm = new_norm(model)
        if isinstance(model, GPTConfig):
            self.up, self.down = nn.Linear(model.hidden, 4 * model.hidden), nn.Linear(4 * model.hidden, model.hidden)
            return
        self.gate = nn.Linear(model.hidden, model.feed_forward, bias=False)
        self.up = nn.Linear(model.hidden, model.feed_forward, bias=False)
        self.down = nn.Linear(model.feed_forward, model.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to "batch seq hidden"."""
        x = self.norm(x)
        if hasattr(self, "gate"):
            return self.down(functional.silu(self.gate(x)) * self.up(x))
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class TorchBlock(nn.Module):
    """The block as one writes it in PyTorch; its parts are named as ours."""

    def __init__(self, case: Case):
        super().__init__()
        self.attention, self.feed_forward = TorchAttention(case), TorchFeedForward(case.model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From and to "batch seq hidden"."""
        x = x + self.attention(x)
        return x + self.feed_forward(x)


def device_of(case: Case) -> str:
    """PyTorch's name for the platform."""
    return "cuda" if case.platform == "gpu" else "cpu"


def new_norm(model: GPTConfig | LlamaConfig) -> nn.Module:
    """Of the same kind as the model's."""
    if isinstance(model, GPTConfig):
        return nn.LayerNorm(model.hidden, eps=1e-5)
    return nn.RMSNorm(model.hidden, eps=model.norm_epsilon)


Arrays = dict[str, np.ndarray]
Step = Callable[[], tuple[Any, Any, list[Any]]]  # -> output, gradient for the input, gradients for the parameters


def shapes_of(model: GPTConfig | LlamaConfig) -> Any:
    """The shapes of one layer's parameters."""
    layers = jax.eval_shape(LanguageModel(replace(model, num_layers=1)).init, jax.random.key(0))["layers"]
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def inputs_of(case: Case) -> tuple[Arrays, np.ndarray, np.ndarray]:
    """Random parameters by their path, kernels "in out", and the block's input and output gradient; float32."""
    rng = np.random.default_rng(0)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        middle, deviation = (1.0, 0.1) if name.endswith("scale") else (0.0, 0.02)
        return np.float32(middle) + np.float32(deviation) * rng.standard_normal(shape, dtype=np.float32)

    paths = jax.tree_util.tree_leaves_with_path(shapes_of(case.model))
    names = [(".".join(key.key for key in path), leaf.shape) for path, leaf in paths]
    x, dy = rng.standard_normal((2, case.batch, case.seq_len, case.model.hidden), dtype=np.float32)
    return {name: draw(name, shape) for name, shape in names}, x, dy


def jax_step(case: Case, arrays: Arrays, x: np.ndarray, dy: np.ndarray) -> Step:
    """Forward and backward as the pipeline runs them: two programs, and between them what backward needs."""
    layer = LanguageModel(case.model).layer
    device = jax.devices(case.platform)[0]

    def put(array: np.ndarray) -> jax.Array:
        return jax.device_put(array.astype(jnp.dtype(case.dtype)), device)

    params = jax.tree.unflatten(jax.tree.structure(shapes_of(case.model)), map(put, arrays.values()))
    x_there, dy_there = put(x), put(dy)
    vjp = trace_vjp(layer, params, x_there, {}, None)
    forward = jax.jit(vjp.forward)
    backward = jax.jit(lambda params, kept, dy: vjp.backward(params, kept, dy, {}, None))

    def step() -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        y, kept = forward(params, x_there, {}, None)
        d_params, dx = backward(params, kept, dy_there)
        return y, dx, jax.tree.leaves(d_params)

    return step


def torch_step(case: Case, arrays: Arrays, x: np.ndarray, dy: np.ndarray) -> Step:
    """The same in PyTorch: on a GPU compiled, in bfloat16 with the flash kernels of its attention."""
    device, dtype = device_of(case), getattr(torch, case.dtype)
    block = TorchBlock(case).to(device=device, dtype=dtype)
    weights = []
    for name, array in arrays.items():
        path, kind = name.rsplit(".", 1)
        weight = block.get_parameter(f"{path}.{'bias' if kind == 'bias' else 'weight'}")
        with torch.no_grad():
            weight.copy_(torch.from_numpy(array.T if kind == "kernel" else array))
        weights.append(weight)
    x_there = torch.from_numpy(x).to(device=device, dtype=dtype).requires_grad_()
    dy_there = torch.from_numpy(dy).to(device=device, dtype=dtype)
    run = torch.compile(block) if case.platform == "gpu" else block
    is_flash = case.platform == "gpu" and case.dtype == "bfloat16"

    def step() -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_flash else nullcontext():
            y = run(x_there)
        dx, *gradients = torch.autograd.grad(y, [x_there, *weights], dy_there)
        # Kernels are "out in" there.
        return y, dx, [d.T if name.endswith("kernel") else d for name, d in zip(arrays, gradients, strict=True)]

    return step


def difference(case: Case) -> float:
    """The largest difference of the two sides, relative to the largest number of each array.

    Compared are outputs and gradients for the input, in float32 gradients for the parameters too: in bfloat16
    PyTorch may add up those of norms and biases in bfloat16.
    """
    inputs = inputs_of(case)
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
        ours = jax_step(case, *inputs)()
    theirs = torch_step(case, *inputs)()
    pairs = list(zip((*ours[:2], *ours[2]), (*theirs[:2], *theirs[2]), strict=True))
    pairs = pairs if case.dtype == "float32" else pairs[:2]
    return max(_difference(np.asarray(a, np.float32), b.detach().float().cpu().numpy()) for a, b in pairs)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def call_of(model: Any, batch: int, seq_len: int, size: Size) -> Callable[[], Any] | None:
    """A call that runs PyTorch's block forward and backward in bfloat16; None if PyTorch lacks the device.

    Args:
        model: a GPTConfig without dropout, or a LlamaConfig.
        batch: sequences.
        seq_len: tokens of each.
        size: says on which device.

    Raises:
        ValueError: the two blocks' results differ.
    """
    if size.is_gpu and not torch.cuda.is_available():
        return None
    case = Case(model, batch, seq_len, "bfloat16", size.device.platform)
    compare(model.__class__.__name__, case)
    step = torch_step(case, *inputs_of(case))

    def call() -> None:
        step()
        if size.is_gpu:
            torch.cuda.synchronize()

    return call


def compare(name: str, case: Case) -> None:
    """Compares the two sides.

    Raises:
        ValueError: too far.
    """
    apart = difference(case)
    if apart > MOST_DIFFERENCE[case.dtype]:
        raise ValueError(f"{name}: the two blocks differ by {apart:.1e}, more than {MOST_DIFFERENCE[case.dtype]:.0e}")


def small_case(family: str, platform: str) -> Case:
    """A small block of a family, "gpt" or "llama", in float32."""
    sizes: dict[str, Any] = {"num_layers": 1, "hidden": 128, "num_heads": 4, "vocab_size": 256, "attention": "chunked"}
    models = {
        "gpt": lambda: GPTConfig(**sizes, num_positions=192),
        "llama": lambda: LlamaConfig(**sizes, num_kv_heads=2, feed_forward=448, rope_theta=500000.0),
    }
    return Case(models[family](), batch=2, seq_len=192, dtype="float32", platform=platform)
