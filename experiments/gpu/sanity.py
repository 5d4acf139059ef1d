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
from jaxpipe.compile import predict
from jaxpipe.models.attention import ATTENTION, Visible
from jaxpipe.training.batches import example_batch, put_batch
from jaxpipe.training.setup import build_pipeline, optimizer_and_step
from jaxpipe.training.step import init_state

SCHEDULES = ("1f1b", "zb_v")  # one whose backward is whole, and one with halves, on one device


def cells(size: Size) -> Iterator[Cell]:
    """The quickstart on both platforms, each form of attention, and bytes in use."""
    for schedule in SCHEDULES:
        yield Cell(f"quickstart, {schedule}", partial(_quickstart, size, schedule))
    for name in ATTENTION:
        if name != "xla" and (size.is_gpu or name != "cudnn"):
            yield Cell(f"attention {name}", partial(_attention, size, name))
    yield Cell("bytes of a step", partial(_bytes, size))


PART = Part("sanity", "Sanity", cells)


def _quickstart(size: Size, schedule: str) -> Record:
    """The losses of the quickstart's first steps on the device, beside those on a CPU."""
    num_steps = 3 if size.quick else 20
    losses = {
        platform: _losses(platform, schedule, num_steps) for platform in dict.fromkeys((size.device.platform, "cpu"))
    }
    here, cpu = losses[size.device.platform], losses["cpu"]
    apart = [abs(a - b) / b for a, b in zip(here, cpu, strict=True)]
    record: Record = {"steps": num_steps, "last_loss": here[-1], "last_loss_on_cpu": cpu[-1]}
    return record | {"first_apart": apart[0], "second_apart": apart[1], "most_apart": max(apart)}


def _losses(platform: str, schedule: str, num_steps: int) -> list[float]:
    """The losses of the steps, with products in float32 proper: the first GPUs' default is TF32."""
    fields = {"mesh.pipe": 1, "mesh.platform": platform, "train.steps": num_steps, "checkpoint.save_every": 0}
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
    model, pipeline = build_pipeline(config, [size.device])
    optimizer, step = optimizer_and_step(config, model, pipeline)
    state = init_state(model, pipeline, optimizer, seed=0)
    batch = put_batch(pipeline, example_batch(config))
    predicted = predict(pipeline, state, batch, has_dropout=False)
    compiled = step.lower(state, batch).compile()
    memory = compiled.memory_analysis()
    counted = memory.argument_size_in_bytes + memory.output_size_in_bytes
    record: Record = {
        "predicted_gib": predicted.total_bytes / 2**30,
        "compiled_gib": (counted - memory.alias_size_in_bytes + memory.temp_size_in_bytes) / 2**30,
    }
    for _ in range(2):
        state, _ = compiled(state, batch)
    jax.block_until_ready(state)
    if stats := size.device.memory_stats():
        record |= {"in_use_gib": stats["bytes_in_use"] / 2**30, "peak_gib": stats["peak_bytes_in_use"] / 2**30}
    return record
