"""Times one transformer block, forward and backward, in jaxpipe and in plain PyTorch, by turns in one process.

python experiments/004_block_on_a_gpu/run.py    # with a GPU; without one a small block, to see that it runs

Needs torch (2.13.0 was tried). Both sides have the same weights, and what they compute is compared before
anything is timed.
"""

from __future__ import annotations

import argparse
import os
import runpy
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs memory too

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from jaxpipe.config import model_config
from jaxpipe.errors import ConfigError
from jaxpipe.mesh import choose_devices
from jaxpipe.models import GPTConfig, LanguageModel, LlamaConfig
from jaxpipe.models.rotary import frequencies
from jaxpipe.program.vjp import vjp_backward, vjp_forward

CONFIGS = Path(__file__).parents[2] / "configs"
SEQUENCES = {"gpt3_13b": 4, "llama3_8b": 1}  # of a microbatch: 8192 tokens each
NUM_WARM_UPS, NUM_REPEATS, NUM_CALLS = 3, 20, 5
# Dense bfloat16, FLOP/s. Source: NVIDIA's data sheets of the SXM modules.
PEAK_FLOPS_PER_S = {"A100": 312e12, "H100": 989e12, "H200": 989e12}
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
            plane = torch.tensor(frequencies(self.head_size, model.rope_theta, model.rope_scaling))
            angle = torch.outer(position, plane)
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
    x_like = jax.ShapeDtypeStruct(x_there.shape, x_there.dtype)
    forward = jax.jit(partial(vjp_forward, layer))
    backward = jax.jit(lambda params, kept, dy: vjp_backward(layer, params, kept, x_like, dy, {}, None))

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


def block_flops(case: Case) -> int:
    """FLOPs of one forward and backward: matrix products, attention as if it were not causal, nothing twice.

    Source: Narayanan et al., SC 2021, section 5.1, without recomputation: forward 2 a product's number and
    4 seq hidden a token for attention; backward twice that.
    """
    leaves = jax.tree.leaves(shapes_of(case.model))
    kernels = sum(leaf.size for leaf in leaves if len(leaf.shape) == 2)
    return 3 * case.batch * case.seq_len * (2 * kernels + 4 * case.seq_len * case.model.hidden)


def step_seconds(case: Case) -> tuple[float, float]:
    """Seconds of a step of ours and of theirs: medians, the sides by turns, each of some calls in a row."""
    inputs = inputs_of(case)
    sides = (jax_step(case, *inputs), torch_step(case, *inputs))

    def seconds(step: Step) -> float:
        start, result = time.perf_counter(), None
        for _ in range(NUM_CALLS):
            result = step()
        jax.block_until_ready([leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)])
        if case.platform == "gpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / NUM_CALLS

    for _ in range(NUM_WARM_UPS):
        for step in sides:
            seconds(step)
    ours, theirs = zip(*([seconds(step) for step in sides] for _ in range(NUM_REPEATS)), strict=True)
    return statistics.median(ours), statistics.median(theirs)


def full_case(name: str, platform: str) -> Case:
    """The block of a preset, in bfloat16 with cuDNN's attention, without dropout."""
    config = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    config.model.attention = "cudnn"
    if config.model.family == "gpt":
        config.model.embedding_dropout = config.model.attention_dropout = config.model.hidden_dropout = 0.0
    return Case(model_config(config), SEQUENCES[name], config.data.seq_len, "bfloat16", platform)


def small_case(name: str, platform: str) -> Case:
    """The same kind of block, small, in float32, without cuDNN."""
    model = full_case(name, platform).model
    if isinstance(model, GPTConfig):
        model = replace(model, hidden=128, num_heads=4, attention="chunked")
    else:
        model = replace(model, hidden=128, num_heads=4, num_kv_heads=2, feed_forward=448, attention="chunked")
    return Case(model, batch=2, seq_len=192, dtype="float32", platform=platform)


def compare(name: str, case: Case) -> None:
    """Prints how far the two sides are apart.

    Raises:
        ValueError: too far.
    """
    apart = difference(case)
    print(f"{name}, {case.dtype}: the two sides differ by {apart:.1e}")
    if apart > MOST_DIFFERENCE[case.dtype]:
        raise ValueError(f"{name}: the two blocks differ by {apart:.1e}, more than {MOST_DIFFERENCE[case.dtype]:.0e}")


def main() -> None:
    """Compares, then prints times and the part of the peak that model FLOPs make up."""
    parser = argparse.ArgumentParser(description="One block beside PyTorch's.")
    parser.add_argument("--quick", action="store_true", help="the same: without a GPU it is small, with one it is fast")
    parser.parse_args()
    devices = choose_devices(1)
    platform, kind = devices.platform, devices.devices[0].device_kind
    if platform == "gpu" and not torch.cuda.is_available():
        raise ConfigError(
            "jax finds a GPU and torch does not\n"
            "  rule same-device: both sides run on the same GPU\n"
            "  repair: install torch with CUDA, or set JAX_PLATFORMS=cpu"
        )
    print(f"{kind}, jax {jax.__version__}, torch {torch.__version__}")
    peak = next((flops for name, flops in PEAK_FLOPS_PER_S.items() if name in kind), None)
    for name in SEQUENCES:
        compare(name, small_case(name, platform))
        case = small_case(name, platform) if platform == "cpu" else full_case(name, platform)
        if platform == "gpu":
            compare(name, case)
        ours, theirs = step_seconds(case)
        flops = block_flops(case)
        print(f"{name}: {case.batch} x {case.seq_len} tokens, {flops / 1e12:.3f} TFLOP, MFU / MFU {theirs / ours:.3f}")
        for side, seconds in (("jaxpipe", ours), ("torch", theirs)):
            part = "unknown peak" if peak is None else f"MFU {flops / seconds / peak:.3f}"
            print(f"  {side:8} {seconds * 1e3:8.2f} ms  {flops / seconds / 1e12:7.1f} TFLOP/s  {part}")


if __name__ == "__main__":
    main()
