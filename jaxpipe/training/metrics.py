"""Where the numbers of a run go: one JSON object a line, TensorBoard, and the progress bar."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType

from tensorboardX import SummaryWriter
from tqdm import tqdm

from jaxpipe.errors import TrainingError
from jaxpipe.training.workdir import METRICS, TENSORBOARD


class MetricsWriter:
    """Writes one row of numbers a step; a context manager, so that a run that fails leaves whole files."""

    def __init__(self, path: Path, *, num_steps: int):
        """Opens the files in `path` and the bar of `num_steps` steps."""
        self._lines = (path / METRICS).open("x", buffering=1)
        self._tensorboard = SummaryWriter(str(path / TENSORBOARD))
        self._bar = tqdm(total=num_steps, unit="step", dynamic_ncols=True, mininterval=0.5)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Writes the numbers of `step`, counted from 1, which has just ended."""
        self._lines.write(json.dumps({"step": step, **numbers}, allow_nan=False) + "\n")
        for name, number in numbers.items():
            self._tensorboard.add_scalar(name, number, step)
        self._bar.set_postfix(
            loss=f"{numbers['loss']:.3f}", tokens_per_s=f"{numbers['tokens_per_s']:.0f}", refresh=False
        )
        self._bar.update(1)

    def say(self, text: str) -> None:
        """Prints `text` without tearing the bar."""
        self._bar.write(text)

    def __enter__(self) -> MetricsWriter:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes files and bar."""
        self._bar.close()
        self._tensorboard.close()
        self._lines.close()


def check_finite(step: int, numbers: dict[str, float]) -> None:
    """Stops a run whose `numbers` of `step` are not all finite.

    Raises:
        TrainingError: one is infinite or not a number.
    """
    broken = [name for name, number in numbers.items() if not math.isfinite(number)]
    if broken:
        raise TrainingError(
            f"step {step}: {broken[0]}={numbers[broken[0]]}\n"
            "  rule finite-numbers: a run goes on while its losses and gradients are finite\n"
            f"      {', '.join(f'{name}={number:.4g}' for name, number in numbers.items())}\n"
            f"      metrics and parameters of step {step} are not written\n"
            "  repair: set a smaller optimizer.learning_rate or optimizer.max_grad_norm,"
            " a larger optimizer.warmup_fraction, or model.dtype='float32'"
        )
