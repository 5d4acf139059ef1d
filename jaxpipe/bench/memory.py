"""What the compiled training step holds on each device, beside what the schedule says it must hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpipe.bench.formula import layer_bytes
from jaxpipe.bench.problem import Problem
from jaxpipe.config import model_config
from jaxpipe.mesh import Randomness
from jaxpipe.program import Pipeline
from jaxpipe.program.accounting import held_bytes
from jaxpipe.program.hlo import whole_writes
from jaxpipe.training.optimizer import learning_rate, make_optimizer
from jaxpipe.training.step import init_state, make_train_step

_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "pred", "int32": "s32", "uint8": "u8"}


def measure_memory(problem: Problem) -> dict[str, Any]:
    """Bytes per device of the config's whole training step, its compile time and copies of big buffers.

    Returns:
        compile_s (tracing, lowering and compiling); argument_bytes, temp_bytes, alias_bytes as XLA says;
        slot_bytes and the same as the literature counts it, formula_slot_bytes; num_slots; expected_temp_bytes:
        what `held_bytes` counts, and the larger of the temporaries of one layer's and of the head's forward and
        backward, each compiled alone;
        hlo_slot_copies and hlo_gradient_copies: writes of a whole leaf of the page pool or of the running
        gradient sums in the program's loops.
    """
    config, pipeline, table = problem.config, problem.pipeline, problem.pipeline.table
    optimizer = make_optimizer(config)
    state = init_state(problem.model, pipeline, optimizer, seed=0)
    step = make_train_step(
        pipeline,
        optimizer,
        learning_rate(config),
        max_grad_norm=config.optimizer.max_grad_norm,
        dropout_seed=problem.dropout_seed,
    )
    start = time.perf_counter()
    compiled = step.lower(state, problem.batch).compile()
    compile_s = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()

    pages = pipeline.page_like(problem.params, problem.batch)
    held = held_bytes(pipeline, problem.params, problem.batch)
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
        "expected_temp_bytes": sum(held.values()) + max(_layer_temp_bytes(problem), _head_temp_bytes(problem)),
        "hlo_slot_copies": len(whole_writes(text, pool_shapes(table.storage.num_pages, pages))),
        "hlo_gradient_copies": len(whole_writes(text, gradient_shapes(pipeline, problem.params))),
    }


def gradient_shapes(pipeline: Pipeline, params: Any) -> set[str]:
    """The shapes of the layers' running gradient sums, as HLO writes them; only matrices, the big ones."""
    pairs = zip(jax.tree.leaves(params["layers"]), jax.tree.leaves(pipeline.parts(params)["layers"]), strict=True)
    shapes = [(*leaf.shape[1:3], *part.compute_shape) for leaf, part in pairs if len(part.compute_shape) > 1]
    return {f"f32[{','.join(map(str, shape))}]" for shape in shapes}


def pool_shapes(num_pages: int, pages: list[jax.ShapeDtypeStruct]) -> set[str]:
    """The shapes of the page pool's leaves, as HLO writes them."""
    return {f"{_HLO_DTYPES[str(page.dtype)]}[{num_pages},{page.size}]" for page in pages}


def _layer_temp_bytes(problem: Problem) -> int:
    """Temporaries of one layer's forward and backward."""
    x = problem.pipeline.message_like(problem.params, problem.batch)
    random = None if problem.dropout_seed is None else Randomness.like()

    def forward_and_backward(layer: Any, x: jax.Array, random: Randomness | None, dy: jax.Array) -> Any:
        y, vjp = jax.vjp(lambda layer, x: problem.pipeline.functions.layer(layer, x, random), layer, x)
        return y, vjp(dy)

    memory = _compiled_alone(problem, forward_and_backward, _copies(problem, "layers"), x, random, x)
    return memory.temp_size_in_bytes


def _head_temp_bytes(problem: Problem) -> int:
    """Temporaries of the head's forward and backward, the gradients among them: they are added to running sums."""
    x = problem.pipeline.message_like(problem.params, problem.batch)
    targets = jax.ShapeDtypeStruct((x.shape[0], problem.config.data.seq_len), np.int32)

    def forward_and_backward(shared: Any, x: jax.Array, targets: jax.Array) -> Any:
        head = problem.pipeline.functions.head
        return jax.value_and_grad(lambda shared, x: head(shared, x, {"targets": targets}), (0, 1))(shared, x)

    memory = _compiled_alone(problem, forward_and_backward, _copies(problem, "shared"), x, targets)
    return memory.temp_size_in_bytes + memory.output_size_in_bytes


def _copies(problem: Problem, kind: str) -> Any:
    """The shapes of a device's compute copies of the shared parameters, or of those of one layer."""
    parts = problem.pipeline.parts(problem.params)[kind]
    return jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.compute_shape, problem.config.model.dtype), parts)


def _compiled_alone(problem: Problem, function: Callable, *arguments: Any) -> Any:
    """XLA's count of the bytes of `function` on each device, given the shapes of its arguments there."""
    on_devices = jax.shard_map(function, mesh=problem.pipeline.mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(on_devices).lower(*arguments).compile().memory_analysis()
