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


PEAK = """
import sys
from jaxpipe.compile.__main__ import main

assert main(sys.argv[1:]) == 0
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_host_bytes(*arguments: str) -> int:
    """Memory of the host that the command takes at most; `ru_maxrss` would count what starts it, too."""
    command = [sys.executable, "-c", PEAK, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **AS_A_USER}, capture_output=True, text=True, check=True
    )
    return 1024 * int(done.stdout.split()[-2])


def compiled(*arguments: str) -> dict[str, Any]:
    """What the command prints as JSON."""
    result = run(*arguments, "--format=json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
