"""The rows that a run which goes on starts with: those up to its step, without what a killed process left half."""

from __future__ import annotations

import json
import os
from pathlib import Path


def keep_rows(file: Path, *, last_step: int) -> int:
    """Leaves in `file`, where it exists, the rows of the steps up to `last_step`, each as it is.

    The file is replaced whole: a process that is killed meanwhile leaves the old one.

    Args:
        file: one JSON object a line, each with an int "step".
        last_step: the step whose state the run goes on from.

    Returns:
        How many lines were no such rows, and are left out too: the last one of a process that was killed.
    """
    if not file.exists():
        return 0
    written, num_damaged = file.with_name(f"{file.name}.partial"), 0
    with file.open("rb") as old, written.open("wb") as new:
        for line in old:
            step = _step_of(line)
            num_damaged += step is None
            if step is not None and step <= last_step:
                new.write(line)
        new.flush()
        os.fsync(new.fileno())
    os.replace(written, file)
    return num_damaged


def _step_of(line: bytes) -> int | None:
    """The step of a row; None of a line that is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (KeyError, TypeError, ValueError):
        return None
    return step if isinstance(step, int) else None
