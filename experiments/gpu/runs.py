"""`jaxpipe.train` in a process of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MEMORY_VARIABLES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")  # JAX's names of it
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 180.0  # where processes share a GPU a message takes about 10 ms, so that 20 steps take less than a minute


def metrics_of_run(
    config: Path,
    fields: Mapping[str, object],
    *,
    num_processes: int = 1,
    timeout_s: float = TIMEOUT_S,
    **environment: str,
) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a run that is thrown away, and saves nothing.

    Args:
        config: the config file.
        fields: fields of it that are set otherwise, by their names such as "train.steps".
        num_processes: processes of the run; several share the first GPU.
        timeout_s: kills a run that has not ended by then.
        environment: variables for the process besides those of this one.

    Raises:
        RuntimeError: the run failed, or hung; the last lines that it printed.
    """
    fields = {"checkpoint.save_every": 0, "checkpoint.save_at_end": False, **fields}
    with tempfile.TemporaryDirectory() as folder:
        command, inherited = [sys.executable, "-m", "jaxpipe.train"], dict(os.environ)
        if num_processes > 1:
            # The page's own process has set its fraction of the memory there, which the launcher would keep.
            inherited = {name: value for name, value in inherited.items() if name not in MEMORY_VARIABLES}
            share = (f"--num_processes={num_processes}", f"--processes_per_device={num_processes}")
            command = [sys.executable, "-m", "jaxpipe.launch", *share, "--"]
        command += [f"--config={config}", f"--workdir={folder}/run"]
        command += [f"--config.{name}={value}" for name, value in fields.items()]
        output, metrics = Path(folder) / "output", Path(folder) / "run" / "metrics.jsonl"
        try:
            # Into a file, since a pipe would be read until all who can write to it have ended. The processes of a
            # launcher that is killed end with it.
            with output.open("w") as file:
                code = subprocess.run(
                    command, cwd=ROOT, env=inherited | environment, stdout=file, stderr=file, timeout=timeout_s
                ).returncode
        except subprocess.TimeoutExpired:
            steps = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            raise RuntimeError(f"hangs: killed after {timeout_s:g} s and {steps} steps; {_end(output)}") from None
        if code:
            raise RuntimeError(_end(output))
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def _end(output: Path) -> str:
    """The last lines of an output, and the error of jaxpipe's in it, in a line."""
    lines = output.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if "Error: " in line or "LostProcess: " in line]
    return " ".join(dict.fromkeys([*errors[:1], *lines[-3:]]))
