"""Whether the program computes on this device what it computes on a CPU, in the memory that is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from experiments.gpu.cells import Cell, Part, Record, Size
from experiments.gpu.layers import SHAPES, config_of
from experiments.gpu.runs import ROOT, metrics_of_run
from jaxpipe.compile import predict, training_step
from jaxpipe.mesh import make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.models.attention import ATTENTION, Visible
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build

SCHEDULES = ("1f1b", "zb_v")  # one whose backward is whole, and one with halves, on one device


def cells(size: Size) -> Iterator[Cell]:
    """Gradients, the quickstart on both platforms, each form of attention, and bytes in use."""
    for schedule in SCHEDULES:
        yield Cell(f"gradients, {schedule}", partial(_gradients, size, schedule))
    for schedule in SCHEDULES:
        yield Cell(f"quickstart, {schedule}", partial(_quickstart, size, schedule))
    for name in ATTENTION:
        if name != "xla" and (size.is_gpu or name != "cudnn"):
            yield Cell(f"attention {name}", partial(_attention, size, name))
    yield Cell("bytes of a step", partial(_bytes, size))


PART = Part("sanity", "Sanity", cells, minutes=6, cell_s=120.0)


def _gradients(size: Size, schedule: str) -> Record:
    """How far gradients in float32 are from `jax.grad` on the device, and that from `jax.grad` on a CPU.

    Each is the norm of a parameter's difference over its norm, of the parameter where it is largest.
    """
    built = build(schedule, num_devices=1, num_microbatches=4)
    config = GPTConfig(num_layers=4, hidden=128, num_heads=4, vocab_size=512, num_positions=64)
    model = LanguageModel(config)
    cpu = jax.devices("cpu")[0]
    params = jax.device_get(jax.jit(model.init)(jax.device_put(jax.random.key(0), cpu)))
    tokens = np.random.default_rng(0).integers(config.vocab_size, size=(4, 2, 65), dtype=np.int32)
    batch = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:]}

    scale = 1 / batch["targets"].size

    def loss(params: Any, batch: dict[str, Any]) -> jax.Array:
        losses = jax.lax.map(lambda microbatch: model.loss_sum(params, microbatch), batch)
        return scale * losses.sum()

    plain = jax.jit(jax.grad(loss))
    with jax.default_matmul_precision("highest"):
        pipeline = Pipeline(built, make_mesh(pipe=1, devices=[size.device]), StageFunctions.of(model), num_layers=4)
        _, grads = pipeline.loss_and_grads(pipeline.to_stages(params), batch, scale)
        found = jax.device_get(pipeline.from_stages(grads))
        here, on_cpu = (jax.device_get(plain(jax.device_put(params, device), batch)) for device in (size.device, cpu))
    return {"apart_from_jax_grad": _most_apart(found, here), "jax_grad_apart_from_cpu": _most_apart(here, on_cpu)}


def _most_apart(found: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return float(max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs))


def _quickstart(size: Size, schedule: str) -> Record:
    """The losses of the quickstart's first steps on the device, beside those on a CPU."""
    num_steps = 3 if size.quick else 10  # later a spike of the gradients' norm makes more of rounding
    losses = {
        platform: _losses(platform, schedule, num_steps) for platform in dict.fromkeys((size.device.platform, "cpu"))
    }
    here, cpu = losses[size.device.platform], losses["cpu"]
    apart = [abs(a - b) / b for a, b in zip(here, cpu, strict=True)]
    record: Record = {"steps": num_steps, "last_loss": here[-1], "last_loss_on_cpu": cpu[-1]}
    return record | {"first_apart": apart[0], "second_apart": apart[1], "most_apart": max(apart)}


def _losses(platform: str, schedule: str, num_steps: int) -> list[float]:
    """The losses of the steps, with products in float32 proper: the first GPUs' default is TF32."""
    fields = {"mesh.pipe": 1, "mesh.platform": platform, "train.steps": num_steps}
    fields["pipeline.schedule"] = schedule
    config = ROOT / "configs" / "quickstart.py"
    return [row["loss"] for row in metrics_of_run(config, fields, JAX_DEFAULT_MATMUL_PRECISION="highest")]


def _attention(size: Size, name: str) -> Record:
    """How far a form of attention is from `xla` in bfloat16: of the largest number, forward and for each input."""
    batch, seq_len, heads, head_size = (1, 128, 4, 64) if size.quick else (2, 2048, 16, 128)
    rng = np.random.default_rng(0)

    def put(num_heads: int) -> jax.Array:
        return size.normal(rng, (batch, seq_len, num_heads, head_size))

    arguments, dy = (put(heads), put(heads // 4), put(heads // 4)), put(heads)
    visible = Visible(causal=True, window=None)

    def both(form: str) -> Any:
        def attend(*arguments: jax.Array) -> jax.Array:
            return ATTENTION[form](*arguments, visible=visible, dropout=None)

        def forward_and_backward(*arguments: jax.Array) -> Any:
            y, vjp = jax.vjp(attend, *arguments)
            return y, *vjp(dy)

        return jax.jit(forward_and_backward).lower(*arguments).compile()

    ours, plain = both(name), both("xla")
    pairs = zip(("output", "query", "key", "value"), ours(*arguments), plain(*arguments), strict=True)
    record: Record = {f"{what}_apart": _apart(found, expected) for what, found, expected in pairs}
    seconds, plain_s = size.seconds(partial(ours, *arguments), partial(plain, *arguments))
    return record | {"ms": 1e3 * seconds, "xla_ms": 1e3 * plain_s}


def _apart(found: jax.Array, expected: jax.Array) -> float:
    ours, plain = (np.asarray(each, np.float32) for each in (found, expected))
    return float(np.abs(ours - plain).max() / np.abs(plain).max())


def _bytes(size: Size) -> Record:
    """Bytes at the peak of a training step of a few layers, beside the prediction and XLA's own count."""
    config = config_of(SHAPES[0], size, num_layers=4)
    config.data.batch_size = 4
    config.pipeline.num_microbatches = 4
    of = training_step(config, [size.device])
    state, batch = of.init(), of.example()
    predicted = predict(of.step, state, batch, has_dropout=False)
    compiled = of.step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    counted = memory.argument_size_in_bytes + memory.output_size_in_bytes
    record: Record = {
        "predicted_gib": predicted.total_bytes / 2**30,
        "compiled_gib": (counted - memory.alias_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
    }
    for _ in range(2):
        state, _ = compiled(state, lambda: batch)
    jax.block_until_ready(state)
    if stats := size.device.memory_stats():
        record |= {"in_use_gib": stats["bytes_in_use"] / 2**30, "peak_gib": stats["peak_bytes_in_use"] / 2**30}
    return record
