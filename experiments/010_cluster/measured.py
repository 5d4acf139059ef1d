"""What a run has left of its steps after the warm-up, read from its metrics.jsonl."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

METRICS = "metrics.jsonl"  # of a run


@dataclass(frozen=True)
class Measured:
    """Of the steps of one run after its warm-up.

    Attributes:
        num_steps: that were measured.
        samples_per_s: of all of them together.
        step_time_s: the median.
        mfu: the median; None where the devices' peak is not known.
        peak_bytes: of the device that needed most; None where devices do not count.
    """

    num_steps: int
    samples_per_s: float
    step_time_s: float
    mfu: float | None
    peak_bytes: float | None


def measured(workdir: Path, *, warmup_steps: int, batch_size: int) -> Measured | None:
    """What the run in `workdir` took; None where there is none, or none of so many steps."""
    if not (workdir / METRICS).is_file():
        return None
    rows = [json.loads(line) for line in (workdir / METRICS).read_text().splitlines()]
    rows = [row for row in rows if row["step"] > warmup_steps]
    if not rows:
        return None
    times_s = [row["step_time_s"] for row in rows]
    mfus = [row["mfu"] for row in rows if "mfu" in row]
    peaks = [row["peak_bytes_in_use"] for row in rows if "peak_bytes_in_use" in row]
    return Measured(
        num_steps=len(rows),
        samples_per_s=batch_size * len(rows) / sum(times_s),
        step_time_s=statistics.median(times_s),
        mfu=statistics.median(mfus) if mfus else None,
        peak_bytes=max(peaks, default=None),
    )
