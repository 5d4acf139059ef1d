"""Compiles the whole training step of GPT-3 13B for eight A100s without any GPU; prints where its bytes go.

python experiments/003_gpt3_13b_without_a_gpu/run.py            # needs the extra gpu-aot
python experiments/003_gpt3_13b_without_a_gpu/run.py --quick    # one mesh
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import Prediction, absent_gpus, compile_step, predict
from jaxpipe.compile.hlo import overlapped_permutes, whole_writes
from jaxpipe.measure.step_pair import gradient_shapes, pool_shapes
from jaxpipe.program import Pipeline

CONFIG = Path(__file__).parents[2] / "configs" / "gpt3_13b.py"
MESHES = ((2, 4), (4, 2))  # (pipe, tensor)
NUM_MICROBATCHES = 8  # of one sequence
PARTS = {
    "layer_forward": "layer forward",
    "layer_backward": "layer backward",
    "head": "head",
    "embed_backward": "embedding backward",
}


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
    pool = pool_shapes(pipeline.shapes(params, step.batch).storage)
    permutes, hidden_permutes = overlapped_permutes(text)
    return Report(
        compile_s=step.compile_s,
        state_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        prediction=predict(step.compiled, step.state, step.batch, has_dropout=step.has_dropout),
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


def rows(report: Report) -> dict[str, str]:
    """What is told of a report, by name."""
    prediction = report.prediction
    return {
        "pages": _gb(prediction.held["pages"]),
        "weights, bf16": _gb(prediction.held["weights"]),
        "gradient sums, float32": _gb(prediction.held["gradients"]),
        "messages": _gb(prediction.held["messages"]),
        **{f"workspace: {PARTS[part]}": _gb(size) for part, size in prediction.workspace.items()},
        "accounted: held and the largest workspace": _gb(prediction.temp_bytes),
        "temporaries as compiled": _gb(report.temp_bytes),
        "as compiled / accounted": f"{report.temp_bytes / prediction.temp_bytes:.3f}",
        "train state, updated in place": _gb(report.state_bytes),
        "permutes in the program, hidden behind an action": f"{report.permutes}, {report.hidden_permutes}",
        "whole writes of pool or gradient sums in the loops": str(report.pool_writes + report.sum_writes),
        "kernels copied before they are multiplied": str(report.kernel_copies),
    }


def main() -> None:
    """Prints one column a mesh."""
    parser = argparse.ArgumentParser(description="Where the bytes of GPT-3 13B's step go, as Markdown.")
    parser.add_argument("--quick", action="store_true", help="one mesh")
    meshes = MESHES[:1] if parser.parse_args().quick else MESHES
    devices = absent_gpus(parse_topology("a100-80g:1x8"))
    columns = {}
    for pipe, tensor in meshes:
        config = runpy.run_path(str(CONFIG))["get_config"]()
        config.mesh.pipe, config.mesh.tensor = pipe, tensor
        config.pipeline.num_microbatches = config.data.batch_size = NUM_MICROBATCHES
        report = measure(config, devices[: pipe * tensor])
        print(f"pipe {pipe} x tensor {tensor}, compiled in {report.compile_s:.0f} s", file=sys.stderr)
        columns[f"pipe {pipe} x tensor {tensor}, jax {jax.__version__}"] = rows(report)
    first, *_ = columns.values()
    print(f"| GB | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name in first:
        print(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")


def _gb(size: float) -> str:
    return f"{size / 1e9:.3f}"


if __name__ == "__main__":
    main()
