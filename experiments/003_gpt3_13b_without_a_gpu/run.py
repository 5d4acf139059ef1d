"""Compiles the whole training step of GPT-3 13B for eight A100s without any GPU; prints where its bytes go.

python experiments/003_gpt3_13b_without_a_gpu/run.py    # needs the CUDA plugin, see jaxpipe.bench.absent_gpus
"""

from __future__ import annotations

import runpy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from jaxpipe.bench.absent_gpus import absent_gpus
from jaxpipe.bench.memory import gradient_shapes, pool_shapes
from jaxpipe.bench.workspace import workspace_bytes
from jaxpipe.program import Pipeline
from jaxpipe.program.accounting import held_bytes
from jaxpipe.program.hlo import overlapped_permutes, whole_writes
from jaxpipe.training.optimizer import learning_rate, make_optimizer
from jaxpipe.training.setup import build_pipeline, dropout_seed
from jaxpipe.training.step import make_train_step, state_like

CONFIG = Path(__file__).parents[2] / "configs" / "gpt3_13b.py"
MESHES = ((2, 4), (4, 2))  # (pipe, tensor)
NUM_MICROBATCHES = 8  # of one sequence


@dataclass(frozen=True)
class Report:
    """Of one compiled step; bytes are per device.

    Attributes:
        compile_s: tracing, lowering and compiling.
        state_bytes: parameters and optimizer state, updated in place.
        temp_bytes: all else that the step needs, as XLA says.
        held: what of it is held between actions, by kind, as `held_bytes` counts.
        workspace: what an action needs besides, by its part, each compiled alone; the largest counts.
        permutes: in the program.
        hidden_permutes: of these, behind an action.
        pool_writes: writes of a whole leaf of the page pool in the loops.
        sum_writes: the same of the running sums of the layers' gradients.
        kernel_copies: a layer's kernels that are copied out of the stack of all before they are multiplied.
    """

    compile_s: float
    state_bytes: int
    temp_bytes: int
    held: dict[str, int]
    workspace: dict[str, int]
    permutes: int
    hidden_permutes: int
    pool_writes: int
    sum_writes: int
    kernel_copies: int

    @property
    def accounted_bytes(self) -> int:
        """What `temp_bytes` should be."""
        return sum(self.held.values()) + max(self.workspace.values())


def compile_step(config: ConfigDict, devices: Sequence[Any]) -> Report:
    """Compiles the training step of a checked config for `devices`."""
    model, pipeline = build_pipeline(config, devices)
    optimizer = make_optimizer(config)
    seed = dropout_seed(config, model)
    state = state_like(model, pipeline, optimizer)
    num_microbatches = config.pipeline.num_microbatches
    shape = (num_microbatches, config.data.batch_size // num_microbatches, config.data.seq_len)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=pipeline.batch_sharding)
    batch = {"tokens": tokens, "targets": tokens}
    step = make_train_step(
        pipeline,
        optimizer,
        learning_rate(config),
        max_grad_norm=config.optimizer.max_grad_norm,
        dropout_seed=seed,
    )
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    compile_s = time.perf_counter() - start

    memory, text = compiled.memory_analysis(), compiled.as_text()
    pool = pool_shapes(pipeline.table.storage.num_pages, pipeline.pages(state.params, batch))
    permutes, hidden_permutes = overlapped_permutes(text)
    return Report(
        compile_s=compile_s,
        state_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        held=held_bytes(pipeline, state.params, batch),
        workspace=workspace_bytes(pipeline, state.params, batch, has_dropout=seed is not None),
        permutes=permutes,
        hidden_permutes=hidden_permutes,
        pool_writes=len(whole_writes(text, pool)),
        sum_writes=len(whole_writes(text, gradient_shapes(pipeline, state.params))),
        kernel_copies=len(whole_writes(text, kernel_shapes(pipeline, state.params))),
    )


def kernel_shapes(pipeline: Pipeline, params: Any) -> set[str]:
    """The shapes of one layer's kernels where they are slices of the stack, as HLO writes them in bfloat16."""
    shapes = [part.compute_shape for part in jax.tree.leaves(pipeline.parts(params)["layers"])]
    return {f"bf16[1,1,{','.join(map(str, shape))}]" for shape in shapes if len(shape) > 1}


def main() -> None:
    """Prints one column a mesh."""
    devices = absent_gpus(max(pipe * tensor for pipe, tensor in MESHES))
    for pipe, tensor in MESHES:
        config = runpy.run_path(str(CONFIG))["get_config"]()
        config.mesh.pipe, config.mesh.tensor = pipe, tensor
        config.pipeline.num_microbatches = config.data.batch_size = NUM_MICROBATCHES
        report = compile_step(config, devices[: pipe * tensor])
        print(
            f"jax {jax.__version__}, pipe {pipe} x tensor {tensor}, compiled in {report.compile_s:.0f} s; GB a device"
        )
        for kind, size in report.held.items():
            print(f"  {kind:24} {size / 1e9:7.3f}")
        for part, size in report.workspace.items():
            print(f"  workspace {part:14} {size / 1e9:7.3f}")
        print(f"  accounted                {report.accounted_bytes / 1e9:7.3f}")
        ratio = report.temp_bytes / report.accounted_bytes
        print(f"  temporaries as compiled  {report.temp_bytes / 1e9:7.3f}, {ratio:.4f} x accounted")
        print(f"  train state              {report.state_bytes / 1e9:7.3f}")
        print(f"  permutes {report.permutes}, hidden behind an action {report.hidden_permutes}")
        print(f"  whole writes in the loops: pool {report.pool_writes}, gradient sums {report.sum_writes}")
        print(f"  kernels copied before they are multiplied {report.kernel_copies}")


if __name__ == "__main__":
    main()
