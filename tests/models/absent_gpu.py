"""Scripts that compile for GPUs that are not there, each in a process of its own, as JAX asks for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

AS_A_USER = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}


def printed(script: str, *arguments: str) -> Any:
    """The last line that `script` prints, as JSON; without the compiler for GPUs the test is skipped."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra gpu-aot compiles for GPUs that are not there")
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **AS_A_USER},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
