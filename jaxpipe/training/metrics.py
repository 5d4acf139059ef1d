"""Where the numbers of a run go: one JSON object a line, TensorBoard, and the progress bar.

One process of a run writes them, and the others have the stand-in that writes nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import jax
from tqdm import tqdm

from jaxpipe.errors import TrainingError
from jaxpipe.training.metrics_file import keep_rows
from jaxpipe.training.workdir import METRICS, TENSORBOARD

Number = float | None


class MetricsWriter:
    """Writes one row of numbers a step; a context manager, so that a run that fails leaves whole files."""

    def __init__(self, path: Path, *, num_steps: int, first_step: int = 0):
        """Opens the files in `path` and the bar of `num_steps` steps, of which `first_step` are done.

        Rows of later steps, which another process wrote that has got further, are dropped: they come again.

        Raises:
            TrainingError: nothing can be written there.
        """
        # Imports torch where there is one: seconds, for whoever writes alone.
        from jaxpipe.training.tensorboard import TensorBoard

        self._path = path
        with self._writing():
            num_damaged = keep_rows(path / METRICS, last_step=first_step)
            self._lines = (path / METRICS).open("a", buffering=1)
            self._tensorboard = TensorBoard(path / TENSORBOARD, first_step=first_step)
        self._bar = tqdm(total=num_steps, initial=first_step, unit="step", dynamic_ncols=True, mininterval=0.5)
        if num_damaged:
            self.say(f"{METRICS}: {num_damaged} lines that were not whole are dropped")

    def write(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Writes the numbers of `step`, counted from 1, which has just ended; null for what is not finite.

        Raises:
            TrainingError: the disk is full, or the files are no longer there.
        """
        finite = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
        row = {"step": step, **{name: finite.get(name) for name in numbers}}
        with self._writing():
            self._lines.write(json.dumps(row, allow_nan=False) + "\n")
            self._tensorboard.write(step, finite)
        self._bar.set_postfix(
            loss=f"{finite.get('loss', math.nan):.3f}", tokens_per_s=f"{numbers['tokens_per_s']:.0f}", refresh=False
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
        if error is not None:  # which is worth more than what closing says of the same disk
            for file in (self._tensorboard, self._lines):
                with suppress(OSError):
                    file.close()
            return
        with self._writing():
            self._tensorboard.close()
            self._lines.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"the metrics of the run in {self._path} cannot be written: {error.strerror}\n"
                f"  rule metrics-files: every step leaves a row in {METRICS} and in {TENSORBOARD}/\n"
                f"      {error.filename or self._path / METRICS}\n"
                "  repair: make room or mend the rights, then start the same command again: it goes on from the newest"
                " checkpoint"
            ) from error


class SilentMetrics:
    """Has the interface of `MetricsWriter` and does nothing: for processes that do not write."""

    def write(self, step: int, numbers: Mapping[str, Number]) -> None:
        """Nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def __enter__(self) -> SilentMetrics:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing."""


def open_metrics(path: Path, *, num_steps: int, first_step: int = 0) -> MetricsWriter | SilentMetrics:
    """The writer of this process: of process 0 a `MetricsWriter`, of all others a `SilentMetrics`."""
    if jax.process_index() == 0:
        return MetricsWriter(path, num_steps=num_steps, first_step=first_step)
    return SilentMetrics()
