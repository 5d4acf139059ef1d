"""Bytes of the compiled step of GPT-96 on eight A800, N = D, as `python -m jaxpipe.compile` counts them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("compiled.json")
_ROOT = Path(__file__).parents[2]
_MICROBATCHES = 8
_NAMES = ("1f1b", "interleaved_1f1b", "chimera", "bitpipe")


def saved() -> dict[str, dict[str, Any]]:
    """Schedule -> what the last compilation has found."""
    return json.loads(RESULTS.read_text())


def compile_all() -> dict[str, dict[str, Any]]:
    """The same anew: minutes each, needs the extra gpu-aot."""
    return {name: _compile(name) for name in _NAMES}


def _compile(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "jaxpipe.compile", "--config=configs/gpt_96.py", "--topology=a800-80g:1x8"]
    command += ["--format=json", f"--config.pipeline.schedule={name}"]
    command += [f"--config.{field}={_MICROBATCHES}" for field in ("pipeline.num_microbatches", "data.batch_size")]
    done = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)
