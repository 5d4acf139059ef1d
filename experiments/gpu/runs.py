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

ROOT = Path(__file__).parents[2]


def metrics_of_run(config: Path, fields: Mapping[str, object], **environment: str) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a run that is thrown away, and saves nothing.

    Args:
        config: the config file.
        fields: fields of it that are set otherwise, by their names such as "train.steps".
        environment: variables for the process besides those of this one.

    Raises:
        RuntimeError: the run failed; the last lines that it printed.
    """
    fields = {"checkpoint.save_every": 0, "checkpoint.save_at_end": False, **fields}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxpipe.train", f"--config={config}", f"--workdir={folder}/run"]
        command += [f"--config.{name}={value}" for name, value in fields.items()]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(" ".join(done.stderr.strip().splitlines()[-3:]))
        return [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
