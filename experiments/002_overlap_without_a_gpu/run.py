"""Compiles a 1F1B step for eight A100s on a machine without any GPU, and reads transfers and bytes off the result.

pip install jax-cuda13-plugin==JAX jax-cuda13-pjrt==JAX nvidia-cuda-nvcc  --no-deps   # JAX: jax's own version
python experiments/002_overlap_without_a_gpu/run.py
"""

import os
import pathlib
import time

os.environ["JAX_PLATFORMS"] = "cpu"  # there is no GPU to find
os.environ["XLA_FLAGS"] = " ".join(
    (
        "--xla_gpu_autotune_level=0",  # no device to tune on
        "--xla_gpu_enable_triton_gemm=false",
        "--xla_gpu_enable_latency_hiding_scheduler=true",
        "--xla_disable_hlo_passes=collective-permute-motion",
    )
)

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxpipe.bench.memory import pool_shapes
from jaxpipe.mesh import make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.hlo import computations, whole_writes
from jaxpipe.schedules import build

D, N, LAYERS_PER_STAGE, HIDDEN, SEQ_LEN = 8, 16, 4, 4096, 2048
TARGET = pathlib.Path(__file__).with_name("a100_80g.txt")


def count_permutes(text: str) -> tuple[int, int]:
    """Permutes, and those with a guarded action between start and done that are not synchronous."""
    num_permutes = num_overlapped = 0
    for computation in computations(text)[0].values():
        started, num_loops = {}, 0
        for instruction in computation.instructions:
            if instruction.opcode == "while":
                num_loops += 1
            elif instruction.opcode == "collective-permute-start":
                started[instruction.name] = num_loops
                num_permutes += 1
            elif instruction.opcode == "collective-permute-done":
                start = next(name for name in started if f"%{name})" in instruction.rest)
                num_overlapped += num_loops > started[start] and '"is_sync":true' not in instruction.rest
    return num_permutes, num_overlapped


def main() -> None:
    """Prints what the compiled program holds and hides."""
    topology = topologies.get_topology_desc(platform="cuda", topology=f"1x1x{D}", target_config=TARGET.read_text())
    model = LanguageModel(
        GPTConfig(
            num_layers=D * LAYERS_PER_STAGE,
            hidden=HIDDEN,
            num_heads=32,
            vocab_size=51200,
            seq_len=SEQ_LEN,
            recompute="attention",
        )
    )
    mesh = make_mesh(data=1, pipe=D, tensor=1, devices=topology.devices)
    functions = StageFunctions.of(model)
    schedule = build("1f1b", num_devices=D, num_microbatches=N)
    pipeline = Pipeline(schedule, mesh, functions, num_layers=D * LAYERS_PER_STAGE)

    params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params,
        pipeline.shardings(params),
    )
    tokens = jax.ShapeDtypeStruct((N, 1, SEQ_LEN), jnp.int32, sharding=pipeline.batch_sharding)
    batch = {"tokens": tokens, "targets": tokens}

    def halved(params):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)

    step = jax.jit(lambda params, batch: pipeline.loss_and_grads(halved(params), batch, 1.0))
    start = time.perf_counter()
    compiled = step.lower(params, batch).compile()
    compile_s = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    low = jax.eval_shape(halved, params)
    num_params = sum(
        leaf.size // (D if path[0].key == "layers" else 1) for path, leaf in jax.tree_util.tree_leaves_with_path(low)
    )
    pool = pool_shapes(pipeline.table.storage.num_pages, pipeline.page_like(low, batch))
    num_permutes, num_overlapped = count_permutes(text)
    slots = pipeline.table.num_slots * pipeline.slot_bytes(low, batch)
    print(f"compile_s {compile_s:.1f}")
    print(f"permutes in the program {num_permutes}, overlapped by an action {num_overlapped}")
    print(f"writes of a whole pool leaf in the loop {len(whole_writes(text, pool))}")
    print(f"temp GB {memory.temp_size_in_bytes / 1e9:.2f} + outputs GB {memory.output_size_in_bytes / 1e9:.2f}")
    print(
        f"{pipeline.table.num_slots} slots GB {slots / 1e9:.2f}, bf16 weights GB {2 * num_params / 1e9:.2f}, "
        f"float32 gradients GB {4 * num_params / 1e9:.2f}"
    )


if __name__ == "__main__":
    main()
