"""Compiles the whole training step of GPT-3 13B for eight A100s without any GPU; prints where its bytes go.

python experiments/003_gpt3_13b_without_a_gpu/run.py    # needs the extra gpu-aot
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpipe.bench.memory import gradient_shapes, pool_shapes
from jaxpipe.compile import Prediction, absent_gpus, compile_step, predict
from jaxpipe.mesh.topology import parse_topology
from jaxpipe.program import Pipeline
from jaxpipe.program.hlo import overlapped_permutes, whole_writes

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
        prediction: of the same.
        permutes: in the program.
        hidden_permutes: of these, behind an action.
        pool_writes: writes of a whole leaf of the page pool in the loops.
        sum_writes: the same of the running sums of the layers' gradients.
        kernel_copies: a layer's kernels that are copied out of the stack of all before they are multiplied.
    """

    compile_s: float
    state_bytes: int
    temp_bytes: int
    prediction: Prediction
    permutes: int
    hidden_permutes: int
    pool_writes: int
    sum_writes: int
    kernel_copies: int


def measure(config: ConfigDict, devices: Sequence[Any]) -> Report:
    """Compiles the training step of a checked config for `devices`."""
    step = compile_step(config, devices)
    pipeline, params = step.pipeline, step.state.params
    memory, text = step.compiled.memory_analysis(), step.compiled.as_text()
    pool = pool_shapes(pipeline.storage(params, step.batch))
    permutes, hidden_permutes = overlapped_permutes(text)
    return Report(
        compile_s=step.compile_s,
        state_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        prediction=predict(pipeline, step.state, step.batch, has_dropout=step.has_dropout),
        permutes=permutes,
        hidden_permutes=hidden_permutes,
        pool_writes=len(whole_writes(text, pool)),
        sum_writes=len(whole_writes(text, gradient_shapes(pipeline, params))),
        kernel_copies=len(whole_writes(text, kernel_shapes(pipeline, params))),
    )


def kernel_shapes(pipeline: Pipeline, params: Any) -> set[str]:
    """The shapes of one layer's kernels where they are slices of the stack, as HLO writes them in bfloat16."""
    shapes = [part.compute_shape for part in jax.tree.leaves(pipeline.parts(params)["layers"])]
    return {f"bf16[1,1,{','.join(map(str, shape))}]" for shape in shapes if len(shape) > 1}


def main() -> None:
    """Prints one column a mesh."""
    devices = absent_gpus(parse_topology("a100-80g:1x8"))
    for pipe, tensor in MESHES:
        config = runpy.run_path(str(CONFIG))["get_config"]()
        config.mesh.pipe, config.mesh.tensor = pipe, tensor
        config.pipeline.num_microbatches = config.data.batch_size = NUM_MICROBATCHES
        report = measure(config, devices[: pipe * tensor])
        print(
            f"jax {jax.__version__}, pipe {pipe} x tensor {tensor}, compiled in {report.compile_s:.0f} s; GB a device"
        )
        for kind, size in report.prediction.held.items():
            print(f"  {kind:24} {size / 1e9:7.3f}")
        for part, size in report.prediction.workspace.items():
            print(f"  workspace {part:14} {size / 1e9:7.3f}")
        print(f"  accounted                {report.prediction.temp_bytes / 1e9:7.3f}")
        ratio = report.temp_bytes / report.prediction.temp_bytes
        print(f"  temporaries as compiled  {report.temp_bytes / 1e9:7.3f}, {ratio:.4f} x accounted")
        print(f"  train state              {report.state_bytes / 1e9:7.3f}")
        print(f"  permutes {report.permutes}, hidden behind an action {report.hidden_permutes}")
        print(f"  whole writes in the loops: pool {report.pool_writes}, gradient sums {report.sum_writes}")
        print(f"  kernels copied before they are multiplied {report.kernel_copies}")


if __name__ == "__main__":
    main()
