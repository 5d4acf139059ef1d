"""`python -m jaxpipe.compile` in a process of its own, as a user starts it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
AS_A_USER = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jaxpipe.compile", *arguments],
        cwd=ROOT,
        env={**os.environ, **AS_A_USER},
        capture_output=True,
        text=True,
        check=False,
    )


def peak_host_bytes(*arguments: str) -> int:
    """Memory of the host that the command takes at most."""
    command = [sys.executable, "-m", "jaxpipe.compile", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **AS_A_USER}, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_maxrss * 1024


def compiled(*arguments: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    result = run(*arguments, "--format=json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
