"""Whether a run fits its devices, found before anything is compiled: a lower bound against what the devices have."""

from __future__ import annotations

from typing import Any

import jax

from jaxpipe.errors import ConfigError
from jaxpipe.program import Pipeline
from jaxpipe.program.shapes import bytes_per_device, held_bytes
from jaxpipe.training.step import TrainState

GIB = 2**30


def check_memory(pipeline: Pipeline, state: TrainState, batch: Any, *, limit_bytes: int | None = None) -> None:
    """Raises ConfigError for a step that needs more memory than a device has.

    Counted is what is held between actions: train state and what `held_bytes` counts. An action's own workspace comes
    on top; `jaxpipe.compile` predicts that, too, and proves it on the compiled program.

    Args:
        pipeline: of the step.
        state: shapes with shardings.
        batch: leaves [num_microbatches, microbatch size, ...], or their shapes.
        limit_bytes: of a device; None asks the first of this process, and one that does not know passes.
    """
    if limit_bytes is None:
        stats = pipeline.mesh.local_devices[0].memory_stats() or {}
        limit_bytes = stats.get("bytes_limit")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    parts = {"train state": bytes_per_device(state), **held_bytes(pipeline.shapes(state.params, shapes))}
    needed = sum(parts.values())
    if limit_bytes is None or needed <= limit_bytes:
        return
    picture = ", ".join(f"{kind} {num / GIB:.3g}" for kind, num in parts.items() if num)
    raise ConfigError(
        f"a step needs at least {needed / GIB:.3g} GiB on each device, which has {limit_bytes / GIB:.3g} GiB\n"
        "  rule memory: train state and what the schedule holds fit the device\n"
        f"      GiB: {picture}\n"
        "  repair: more mesh.pipe, mesh.tensor or mesh.data, pipeline.schedule='bpipe', smaller microbatches (more"
        " pipeline.num_microbatches), or model.recompute='full'; `python -m jaxpipe.compile` shows what a step takes"
    )
