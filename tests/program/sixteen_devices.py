"""Sixteen virtual devices, in a process of their own: the tests' own has eight."""

import os
import subprocess
import sys
from pathlib import Path


def run_on_sixteen_devices(program: str) -> None:
    """Runs Python text that may import test modules of this folder; fails if it does."""
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=16"  # the last one wins
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
