"""Commands of jaxpipe on virtual CPU devices, and a run that takes seconds.

A command runs in this process: its programs are compiled for the eight devices of the suite, and Python and JAX start
once. `in_child` runs it in a process of its own, for what only a process has: its exit status, signals, its devices.
"""

import contextlib
import importlib
import io
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import jax

from jaxpipe.distributed import log

ROOT = Path(__file__).parents[1]
SMALL = [
    "--config.mesh.platform=cpu",
    "--config.mesh.pipe=2",
    "--config.mesh.data=2",
    "--config.pipeline.num_microbatches=3",
    "--config.model.num_layers=3",
    "--config.model.hidden=16",
    "--config.model.hidden_dropout=0.1",
    "--config.data.files=jaxpipe/**/*.py",
    "--config.data.batch_size=12",
    "--config.data.seq_len=16",
    "--config.train.steps=12",
    "--config.train.eval_every=6",
    "--config.train.eval_batches=2",
    "--config.checkpoint.save_every=3",
]


# The suite's options that shorten compilation, without its devices and time-outs.
QUICK = [flag for flag in os.environ["XLA_FLAGS"].split() if flag.startswith(("--xla_cpu_use_", "--xla_cpu_parallel_"))]


def environment(*, is_optimized: bool = False) -> dict[str, str]:
    """Of a command in a process of its own; `is_optimized` compiles as a user's run does, which takes longer."""
    optimization = {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(not is_optimized)}
    flags = "" if is_optimized else " ".join(QUICK)
    return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **optimization}


def in_child(module: str, *arguments: str, is_optimized: bool = False) -> subprocess.CompletedProcess:
    """`python -m jaxpipe.MODULE`, to its end."""
    return subprocess.run(
        [sys.executable, "-m", f"jaxpipe.{module}", *arguments],
        cwd=ROOT,
        env=environment(is_optimized=is_optimized),
        capture_output=True,
        text=True,
        check=False,
    )


def run(module: str, *arguments: str, is_optimized: bool = False, folder: Path = ROOT) -> subprocess.CompletedProcess:
    """`jaxpipe.MODULE.main` in this process, in `folder`; its settings are afterwards as before."""
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(settings(is_optimized=is_optimized))
        try:
            status = importlib.import_module(f"jaxpipe.{module}").main(list(arguments))
        except SystemExit as ended:
            status = ended.code
    return subprocess.CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


def train(
    workdir: Path, *arguments: str, config: str | Path = "configs/quickstart.py", is_optimized: bool = False
) -> subprocess.CompletedProcess:
    return run("train", f"--config={config}", f"--workdir={workdir}", *SMALL, *arguments, is_optimized=is_optimized)


def metrics(workdir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir: Path) -> list[float]:
    return [row["loss"] for row in metrics(workdir)]


@contextlib.contextmanager
def settings(*, is_optimized: bool = False):
    """Puts back what a run sets for its process: environment, JAX's options, what prints."""
    before = dict(os.environ)
    names = (
        "jax_default_device",
        "jax_disable_most_optimizations",
        "jax_platforms",
    )
    options = {name: jax.config.values[name] for name in names}
    verbosity = logging.getLogger("absl").level
    jax.config.update("jax_disable_most_optimizations", not is_optimized)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        for name, value in options.items():
            jax.config.update(name, value)
        logging.getLogger("absl").setLevel(verbosity)
        log._print[0] = print
        log._early.clear()
