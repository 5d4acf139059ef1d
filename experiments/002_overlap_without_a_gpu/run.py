"""Compiles a 1F1B step for eight A100s on a machine without any GPU, and reads transfers and bytes off the result.

python experiments/002_overlap_without_a_gpu/run.py    # needs the extra gpu-aot; half a minute, and so is --quick
"""

import argparse
import sys
import time

import jax
import jax.numpy as jnp

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import absent_gpus
from jaxpipe.compile.hlo import overlapped_permutes, whole_writes
from jaxpipe.compile.prediction import workspace_bytes
from jaxpipe.measure.step_pair import pool_shapes
from jaxpipe.mesh import make_mesh
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.shapes import held_bytes
from jaxpipe.schedules import build

D, N, LAYERS_PER_STAGE, HIDDEN, SEQ_LEN = 8, 16, 4, 4096, 2048


def main() -> None:
    """Prints what the compiled program holds and hides."""
    parser = argparse.ArgumentParser(description="Transfers and bytes of a compiled step, as Markdown.")
    parser.add_argument("--quick", action="store_true", help="the same: it takes half a minute")
    parser.parse_args()
    devices = absent_gpus(parse_topology(f"a100-80g:1x{D}"))
    model = LanguageModel(
        GPTConfig(
            num_layers=D * LAYERS_PER_STAGE,
            hidden=HIDDEN,
            num_heads=32,
            vocab_size=51200,
            num_positions=SEQ_LEN,
            recompute="attention",
        )
    )
    pipeline = Pipeline(
        build("1f1b", num_devices=D, num_microbatches=N),
        make_mesh(data=1, pipe=D, tensor=1, devices=devices),
        StageFunctions.of(model),
        num_layers=D * LAYERS_PER_STAGE,
        dtype="bfloat16",
    )

    params = jax.eval_shape(lambda: pipeline.to_stages(model.init(jax.random.key(0))))
    params = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params,
        pipeline.shardings(params),
    )
    tokens = jax.ShapeDtypeStruct((N, 1, SEQ_LEN), jnp.int32, sharding=pipeline.batch_sharding)
    batch = {"tokens": tokens, "targets": tokens}

    start = time.perf_counter()
    compiled = pipeline.loss_and_grads.lower(params, batch, 1.0).compile()
    compile_s = time.perf_counter() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    pool = pool_shapes(pipeline.shapes(params, batch).storage)
    permutes, hidden = overlapped_permutes(text)
    held = held_bytes(pipeline.shapes(params, batch))
    workspace = max(workspace_bytes(pipeline, params, batch, has_dropout=False).values())
    print(f"compiled in {compile_s:.0f} s", file=sys.stderr)
    kinds = ("pages", "weights", "gradients", "messages")
    assert sum(held[kind] for kind in kinds) == sum(held.values())
    rows = {
        "permutes in the program": permutes,
        "of these hidden behind an action, not synchronous": hidden,
        "writes of a whole pool leaf in the loop": len(whole_writes(text, pool)),
        "temporaries + outputs": _gb(memory.temp_size_in_bytes, memory.output_size_in_bytes),
        "pages, bf16 weights, float32 gradients, messages": _gb(*(held[kind] for kind in kinds)),
        "temporaries of the largest part of an action, compiled alone": _gb(workspace),
        "these together": _gb(sum(held.values()) + workspace),
    }
    print(f"| GB | jax {jax.__version__} |\n|---|---|")
    for name, value in rows.items():
        print(f"| {name} | {value} |")


def _gb(*sizes: float) -> str:
    return " + ".join(f"{size / 1e9:.2f}" for size in sizes)


if __name__ == "__main__":
    main()
