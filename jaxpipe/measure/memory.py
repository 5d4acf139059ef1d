"""What the compiled training step holds on each device, beside what the schedule says it must hold."""

from __future__ import annotations

import time
from typing import Any

import jax

from jaxpipe.compile.hlo import whole_writes
from jaxpipe.compile.prediction import workspace_bytes
from jaxpipe.config import model_config
from jaxpipe.measure.formula import layer_bytes
from jaxpipe.measure.problem import Problem
from jaxpipe.program import Pipeline
from jaxpipe.program.accounting import held_bytes
from jaxpipe.program.storage import Storage
from jaxpipe.training.setup import optimizer_and_step
from jaxpipe.training.step import init_state

_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "pred", "int32": "s32", "uint8": "u8"}


def measure_memory(problem: Problem) -> dict[str, Any]:
    """Bytes per device of the config's whole training step, its compile time and copies of big buffers.

    Returns:
        compile_s (tracing, lowering and compiling); argument_bytes, temp_bytes, alias_bytes as XLA says;
        slot_bytes and the same as the literature counts it, formula_slot_bytes; num_slots; expected_temp_bytes:
        what `held_bytes` counts, and the largest of `workspace_bytes`;
        hlo_slot_copies and hlo_gradient_copies: writes of a whole leaf of the page pool, or of the running
        gradient sums of several layers, in the program's loops.
    """
    config, pipeline, table = problem.config, problem.pipeline, problem.pipeline.table
    optimizer, step = optimizer_and_step(config, problem.model, pipeline)
    state = init_state(problem.model, pipeline, optimizer, seed=0)
    start = time.perf_counter()
    compiled = step.lower(state, problem.batch).compile()
    compile_s = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()

    storage = pipeline.storage(problem.params, problem.batch)
    held = held_bytes(pipeline, problem.params, problem.batch)
    workspace = workspace_bytes(pipeline, problem.params, problem.batch, has_dropout=problem.dropout_seed is not None)
    message = pipeline.message_like(problem.params, problem.batch)
    formula = layer_bytes(
        model_config(config),
        batch=message.shape[0],
        seq_len=config.data.seq_len,
        tensor=config.mesh.tensor,
        itemsize=message.dtype.itemsize,
    )
    return {
        "compile_s": compile_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "slot_bytes": pipeline.slot_bytes(problem.params, problem.batch),
        "formula_slot_bytes": formula * max(pipeline.layers_per_stage),
        "num_slots": table.num_slots,
        "expected_temp_bytes": sum(held.values()) + max(workspace.values()),
        "hlo_slot_copies": len(whole_writes(text, pool_shapes(storage))),
        "hlo_gradient_copies": len(whole_writes(text, gradient_shapes(pipeline, problem.params))),
    }


def gradient_shapes(pipeline: Pipeline, params: Any) -> set[str]:
    """The shapes of the layers' running gradient sums, as HLO writes them; only matrices, the big ones.

    None where a device has one layer: to add to its sum is to write the whole. Of two replicas a device sums the
    gradients of its chunks of both.
    """
    pairs = zip(jax.tree.leaves(params["layers"]), jax.tree.leaves(pipeline.parts(params)["layers"]), strict=True)
    num_replicas = pipeline.schedule.num_replicas
    stacks = [(num_replicas * leaf.shape[1], leaf.shape[2], *part.compute_shape) for leaf, part in pairs]
    shapes = [shape for shape in stacks if len(shape) > 3 and shape[:2] != (1, 1)]
    return {f"f32[{','.join(map(str, shape))}]" for shape in shapes}


def pool_shapes(storage: Storage) -> set[str]:
    """The shapes of the page pools' leaves, as HLO writes them."""
    rows = [row for pool in storage.pools for row in pool.like()]
    return {f"{_HLO_DTYPES[str(row.dtype)]}[{','.join(map(str, row.shape))}]" for row in rows}
