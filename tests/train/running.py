"""Commands of jaxpipe in processes of their own, on virtual CPU devices, and a run that takes seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = [
    "--config.mesh.platform=cpu",
    "--config.mesh.pipe=2",
    "--config.mesh.data=2",
    "--config.pipeline.num_microbatches=3",
    "--config.model.num_layers=3",
    "--config.model.hidden=16",
    "--config.data.files=jaxpipe/**/*.py",
    "--config.data.batch_size=12",
    "--config.data.seq_len=16",
    "--config.train.steps=6",
    "--config.train.eval_every=3",
    "--config.train.eval_batches=2",
]


def environment(*, is_optimized: bool = False) -> dict[str, str]:
    """Of a command; `is_optimized` compiles as a user's run does, which takes longer."""
    optimization = {} if is_optimized else {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **optimization}


def run(module: str, *arguments: str, is_optimized: bool = False) -> subprocess.CompletedProcess:
    """`python -m jaxpipe.MODULE`."""
    return subprocess.run(
        [sys.executable, "-m", f"jaxpipe.{module}", *arguments],
        cwd=ROOT,
        env=environment(is_optimized=is_optimized),
        capture_output=True,
        text=True,
        check=False,
    )


def train(
    workdir: Path, *arguments: str, config: str | Path = "configs/quickstart.py", is_optimized: bool = False
) -> subprocess.CompletedProcess:
    return run("train", f"--config={config}", f"--workdir={workdir}", *SMALL, *arguments, is_optimized=is_optimized)


def metrics(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir: Path) -> list[float]:
    return [row["loss"] for row in metrics(workdir)]
