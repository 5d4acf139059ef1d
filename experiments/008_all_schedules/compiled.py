"""The table of bytes that XLA allocates for the training step of a small GPT on virtual CPU devices.

Goes in: `formulas.ROWS` and devices. Comes out: Markdown, accounted beside compiled, and the bytes of what travels.
Compiles only; nothing is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from formulas import ROWS, Row
from ml_collections import ConfigDict
from tables import NUM_DEVICES, NUM_LAYERS, NUMS_MICROBATCHES, UnitBytes

from experiments.pages import markdown
from jaxpipe.compile import compile_step, predict, training_step
from jaxpipe.config import base_config, check

MICROBATCH_SIZE, SEQ_LEN, HIDDEN, NUM_HEADS = 2, 128, 128, 4


def make_config(row: Row, num_microbatches: int) -> ConfigDict:
    """The small GPT under one schedule, in float32."""
    config = base_config("gpt")
    config.model.update(num_layers=NUM_LAYERS, hidden=HIDDEN, num_heads=NUM_HEADS)
    config.data.update(batch_size=MICROBATCH_SIZE * num_microbatches, seq_len=SEQ_LEN)
    config.pipeline.update(schedule=row.name, options=row.options, num_microbatches=num_microbatches)
    config.mesh.update(pipe=NUM_DEVICES, platform="cpu")
    check(config)
    return config


def unit_bytes(devices: Sequence[Any]) -> UnitBytes:
    """The same for all schedules, but for pages, which are those of whole backwards; from shapes alone."""
    shapes = _shapes(ROWS[0], devices)
    message, layer = shapes.message, jax.tree.leaves(shapes.copies["layer"])
    return UnitBytes(
        message=message.size * message.dtype.itemsize,
        page=shapes.storage.page_bytes,
        layer=sum(leaf.size * leaf.dtype.itemsize for leaf in layer),
    )


def page_bytes(row: Row, devices: Sequence[Any]) -> tuple[int, ...]:
    """Of one schedule's pools, of slots and of what I leaves for W, if anything: bytes of a page."""
    return tuple(pool.page_bytes for pool in _shapes(row, devices).storage.pools)


def _shapes(row: Row, devices: Sequence[Any]) -> Any:
    """All shapes of a step at N=D."""
    of = training_step(make_config(row, NUM_DEVICES), devices)
    return of.pipeline.shapes(of.state.params, of.batch)


def bytes_table(devices: Sequence[Any]) -> str:
    """MB of each device: train state, copies of weights, gradient sums; then pages, and all temporaries."""
    rows = []
    for row in ROWS:
        cells = [row.label]
        for num_microbatches in NUMS_MICROBATCHES:
            step = compile_step(make_config(row, num_microbatches), devices)
            expected = predict(step.compiled, step.state, step.batch, has_dropout=step.has_dropout)
            memory = step.compiled.memory_analysis()
            if len(cells) == 1:
                cells += _mb(memory.alias_size_in_bytes, expected.held["weights"], expected.held["gradients"])
            cells += _mb(expected.held["pages"], expected.temp_bytes, memory.temp_size_in_bytes)
            jax.clear_caches()
        print(f"compiled: {row.label}", flush=True)
        rows.append(cells)
    heads = [f"N={n}: {head}" for n in NUMS_MICROBATCHES for head in ("pages", "accounted", "compiled")]
    return markdown(["schedule", "train state", "weight copies", "gradient sums", *heads], rows)


def _mb(*sizes: int) -> list[str]:
    return [f"{size / 1e6:.1f}" for size in sizes]
