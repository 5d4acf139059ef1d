"""A layer's F, B, I and W in bfloat16, with and without recomputation, beside the roofline and beside PyTorch.

F and B are two programs with residuals in between, as the pipeline runs them; I and W are the halves that split
backwards run. PyTorch's layer is compiled, with its fused attention, and takes turns with ours.
"""

from __future__ import annotations

import math
import runpy
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from ml_collections import ConfigDict
from scipy.optimize import brentq

from experiments.gpu.cells import Cell, Part, Record, Size, compiled
from experiments.gpu.share import Share
from jaxpipe.cluster import Topology
from jaxpipe.config import check, model_config
from jaxpipe.estimate import Roofline, setting_of, traced_layer
from jaxpipe.mesh import TensorAxis, with_losses
from jaxpipe.models import LanguageModel, ModelConfig, model_flops, parameter_shapes
from jaxpipe.program.split_vjp import split_vjp
from jaxpipe.program.vjp import trace_vjp

CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Shape:
    """A layer to measure.

    Attributes:
        name: as the page shows it.
        preset: config in `configs/`.
        batch: sequences of a microbatch.
        tensor: devices that share the layer; one device's share is measured.
        is_mixture: whether its feed forward is one of experts.
    """

    name: str
    preset: str
    batch: int
    tensor: int = 1
    is_mixture: bool = False


SHAPES = (
    Shape("LLaMA-3 8B", "llama3_8b", 1),
    Shape("GPT-3 6.7B", "gpt3_6b7", 4),
    Shape("Mixtral 8x7B", "mixtral_8x7b", 2, is_mixture=True),
    Shape("Qwen3 30B-A3B", "qwen3_30b_a3b", 2, is_mixture=True),
    Shape("GPT-3 13B", "gpt3_13b", 4),
    Shape("GPT-3 96B, a quarter", "gpt3_96b", 1, tensor=4),
)


def config_of(shape: Shape, size: Size, *, recompute: str = "none", num_layers: int = 1) -> ConfigDict:
    """The shape's config for one device, or for those that share a layer, without dropout; small if `size` is quick."""
    config = runpy.run_path(str(CONFIGS / f"{shape.preset}.py"))["get_config"]()
    config.model.num_layers, config.model.recompute = num_layers, recompute
    config.model.attention = "cudnn" if size.is_gpu else "chunked"
    if config.model.family == "gpt":
        config.model.update(embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0)
    if size.quick:
        config.model.update(hidden=256, num_heads=4, vocab_size=512)  # heads of 64 for cuDNN, which four devices share
        if config.model.family != "gpt":
            config.model.update(num_kv_heads=2, feed_forward=512)
        if "num_experts" in config.model:
            config.model.update(num_experts=4, experts_per_token=2)
        if "head_size" in config.model:
            config.model.head_size = "64"
        config.data.seq_len = 64
    config.data.batch_size = shape.batch
    config.pipeline.update(schedule="1f1b", options="", num_microbatches=1, layers_per_stage="auto", head_layers=0.0)
    config.mesh.update(data=1, pipe=1, tensor=shape.tensor, platform="auto", order="auto")
    check(config)
    return config


def cells(size: Size) -> Iterator[Cell]:
    """A cell for the largest rate of a matmul, then one for each shape."""
    yield Cell("matmul", partial(_matmul, size))
    for shape in SHAPES:
        yield Cell(shape.name, partial(_layer, size, shape, "none"))


def recomputed_cells(size: Size) -> Iterator[Cell]:
    """A cell for each shape, with the layer computed again in its backward."""
    for shape in SHAPES:
        yield Cell(shape.name, partial(_layer, size, shape, "full"))


PART = Part("layers", "A layer", cells, minutes=5)
RECOMPUTED = Part("recomputed", "A layer that is computed again in its backward", recomputed_cells, minutes=4)


def _matmul(size: Size) -> Record:
    """TFLOP/s of large bfloat16 products, one after the other."""
    side, number = (512, 2) if size.quick else (8192, 20)
    x = size.normal(np.random.default_rng(0), (side, side), deviation=side**-0.5)

    def products(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, number, lambda _, y: y @ x, x)

    (seconds,) = size.seconds(compiled(products, x))
    return {"side": side, "tflop_per_s": number * 2 * side**3 / seconds / 1e12}


@dataclass(frozen=True)
class Layer:
    """A layer of one device with arguments for its functions.

    Attributes:
        function: (params, x, microbatch, random) -> x.
        params, x, dy: arrays in the compute dtype; x and dy "batch local_seq hidden".
    """

    function: Callable[..., jax.Array]
    params: Any
    x: jax.Array
    dy: jax.Array

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Compiled calls of F, B, I and W."""
        vjp = trace_vjp(self.function, self.params, self.x, {}, None)
        forward = compiled(vjp.forward, self.params, self.x, {}, None)
        _, kept = forward()
        backward = compiled(
            lambda params, kept, dy: vjp.backward(params, kept, dy, {}, None),
            self.params,
            kept,
            self.dy,
        )
        halves = split_vjp(vjp)
        first = compiled(
            lambda params, kept, dy: halves.input_gradient(params, kept, dy, {}, None), self.params, kept, self.dy
        )
        _, _, deferred = first()
        second = compiled(
            lambda params, shared, deferred: halves.weight_gradient(params, shared, deferred, {}, None),
            self.params,
            [kept[index] for index in halves.shared_with_w],
            deferred,
        )
        return {"F": forward, "B": backward, "I": first, "W": second}


def layer_of(size: Size, shape: Shape, recompute: str) -> Layer:
    """The layer of `shape` on the device, with random weights; of a shared layer one device's share.

    Of a mixture it is the residual stream alone: the sums of its routers' losses are not asked for.
    """
    config = config_of(shape, size, recompute=recompute)
    tensor = Share(shape.tensor) if shape.tensor > 1 else TensorAxis()
    model = LanguageModel(model_config(config), tensor)
    rng = np.random.default_rng(0)

    def param(leaf: Any, spec: Any) -> jax.Array:
        parts = [shape.tensor if axis == "tensor" else 1 for axis in (*spec, *[None] * leaf.ndim)][: leaf.ndim - 1]
        own = tuple(dim // part for dim, part in zip(leaf.shape[1:], parts, strict=True))
        return size.normal(rng, own, deviation=0.02)

    shapes = jax.eval_shape(model.init, jax.random.key(0))["layers"]
    params = jax.tree.map(param, shapes, model.specs["layers"])
    stream = (shape.batch, config.data.seq_len // shape.tensor, config.model.hidden)

    def layer(*arguments: Any) -> jax.Array:
        return with_losses(model.layer(*arguments))[0]

    return Layer(layer, params, size.normal(rng, stream), size.normal(rng, stream))


def _layer(size: Size, shape: Shape, recompute: str) -> Record:
    calls = layer_of(size, shape, recompute).calls()
    config = config_of(shape, size, recompute=recompute)
    record: Record = {"tokens": shape.batch * config.data.seq_len}
    has_peer = recompute == "none" and shape.tensor == 1 and not shape.is_mixture
    torch_call = _torch_call(size, shape) if has_peer else None
    timed = [*calls.values(), *([torch_call] if torch_call else [])]
    seconds = dict(zip([*calls, "torch"], size.seconds(*timed), strict=False))
    record["ms"] = {name: 1e3 * each for name, each in seconds.items()}
    record["estimated_ms"] = _estimated(config, size)
    flops = layer_flops(model_config(config), shape, config.data.seq_len)
    record["tflop"] = flops / 1e12
    if size.hardware:
        peak = size.hardware.bf16_flops_per_s
        record["mfu"] = flops / (seconds["F"] + seconds["B"]) / peak
        if torch_call:
            record["torch_mfu"] = flops / seconds["torch"] / peak
    return record


def _estimated(config: ConfigDict, size: Size, matmul_fraction: float | None = None) -> Record:
    """The roofline's milliseconds of the layer; none on a device that it does not know."""
    if size.hardware is None:
        return {}
    # A share is measured on one GPU, where no collective takes time, and a layer alone has neither pages nor sums.
    setting = setting_of(config, Topology(size.hardware, 1, config.mesh.tensor))
    source = Roofline(size.hardware, matmul_fraction=matmul_fraction, exposed_fraction=0.0, halves_copy=False)
    times, pages_s = source.times(setting), source.memory_s(2 * traced_layer(setting).page_bytes)
    # A gradient is read in 16 bits, and its float32 sum read and written.
    shapes = parameter_shapes(model_config(config)).layer
    own = sum(math.prod(shape.local_dims(num_kernel_parts=config.mesh.tensor)) for shape in shapes)
    sums_s = source.memory_s((2 + 2 * 4) * own)
    return {
        "F": 1e3 * (times.layer_forward_s - pages_s),
        "B": 1e3 * (times.layer_backward_s - sums_s),
        "I": 1e3 * times.layer_input_gradient_s,
        "W": 1e3 * (times.layer_weight_gradient_s - sums_s),
    }


def fitted_matmul_fraction(size: Size, records: Mapping[str, Record]) -> float | None:
    """The fraction of the peak at which the roofline's F and B are as often too long as too short.

    One large product alone says less: it may draw so much power that the clock slows down.

    Args:
        size: says which GPU.
        records: of this part.
    """
    shapes = [shape for shape in SHAPES if "ms" in records.get(shape.name, {}) and not shape.is_mixture]
    if size.hardware is None or not shapes:
        return None

    def too_long(fraction: float) -> float:
        found = [(_estimated(config_of(shape, size), size, fraction), records[shape.name]["ms"]) for shape in shapes]
        return statistics.median(estimated[kind] / ms[kind] for estimated, ms in found for kind in "FB") - 1.0

    return brentq(too_long, 0.1, 1.5, xtol=1e-3)


def layer_flops(model: ModelConfig, shape: Shape, seq_len: int) -> float:
    """Model FLOPs of F and B of one device's share: matmuls, attention as if it were not causal, nothing twice."""
    one, two = (model_flops(replace(model, num_layers=number), seq_len=seq_len) for number in (1, 2))
    return shape.batch * (two - one) / shape.tensor


def _torch_call(size: Size, shape: Shape) -> Callable[[], Any] | None:
    """PyTorch's layer, forward and backward; None where PyTorch lacks the device."""
    try:
        from experiments.gpu import torch_block
    except ImportError:
        return None
    config = config_of(shape, size)
    return torch_block.call_of(model_config(config), shape.batch, config.data.seq_len, size)
