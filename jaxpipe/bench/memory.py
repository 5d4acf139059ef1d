"""What the compiled training step holds on each device, beside what the schedule says it must hold."""

from __future__ import annotations

import time
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpipe.bench.problem import Problem
from jaxpipe.program.hlo import whole_writes
from jaxpipe.training.optimizer import learning_rate, make_optimizer
from jaxpipe.training.step import init_state, make_train_step

_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "pred", "int32": "s32", "uint8": "u8"}


def measure_memory(config: ConfigDict, problem: Problem) -> dict[str, Any]:
    """Bytes per device of the config's whole training step, its compile time and copies of the page pool.

    Returns:
        compile_s (tracing, lowering and compiling); argument_bytes, temp_bytes, alias_bytes as XLA says;
        slot_bytes, num_slots; expected_temp_bytes: slots, float32 gradients, compute weights (where they
        are a copy) and inbox, and the temporaries of one layer's forward and backward compiled alone;
        hlo_slot_copies.
    """
    pipeline, table = problem.pipeline, problem.pipeline.table
    optimizer = make_optimizer(config)
    state = init_state(problem.model, pipeline, optimizer, seed=0)
    step = make_train_step(pipeline, optimizer, learning_rate(config), dtype=config.model.dtype)
    start = time.perf_counter()
    compiled = step.lower(state, problem.batch).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()

    pages = pipeline.page_like(problem.params, problem.batch)
    slot_bytes = pipeline.slot_bytes(problem.params, problem.batch)
    message = pipeline.message_like(problem.params, problem.batch)
    num_params = sum(leaf.size // leaf.sharding.num_devices for leaf in jax.tree.leaves(problem.params["layers"]))
    num_params += sum(leaf.size for leaf in jax.tree.leaves(problem.params["shared"]))
    weight_bytes = 0 if config.model.dtype == "float32" else num_params * message.dtype.itemsize
    inbox_bytes = (table.storage.num_inbox + 1) * message.size * message.dtype.itemsize
    held_bytes = table.num_slots * slot_bytes + 4 * num_params + weight_bytes + inbox_bytes
    return {
        "compile_s": compile_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "slot_bytes": slot_bytes,
        "num_slots": table.num_slots,
        "expected_temp_bytes": held_bytes + _layer_temp_bytes(problem),
        "hlo_slot_copies": len(whole_writes(compiled.as_text(), pool_shapes(table.storage.num_pages, pages))),
    }


def pool_shapes(num_pages: int, pages: list[jax.ShapeDtypeStruct]) -> set[str]:
    """The shapes of the page pool's leaves, as HLO writes them."""
    return {f"{_HLO_DTYPES[str(page.dtype)]}[{','.join(map(str, (num_pages, *page.shape)))}]" for page in pages}


def _layer_temp_bytes(problem: Problem) -> int:
    """Temporaries of one layer's forward and backward, compiled alone."""
    pipeline = problem.pipeline
    x = pipeline.message_like(problem.params, problem.batch)
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), problem.canonical["layers"])

    def forward_and_backward(layer: Any, x: jax.Array, dy: jax.Array) -> Any:
        y, vjp = jax.vjp(problem.model.layer, layer, x)
        return y, vjp(dy)

    memory: Any = jax.jit(forward_and_backward).lower(layer, x, x).compile().memory_analysis()
    return memory.temp_size_in_bytes
