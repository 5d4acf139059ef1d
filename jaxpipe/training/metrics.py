"""The metrics of a run: a JSON line for each step, TensorBoard, the progress bar, or lines, and pictures by layer.

Process 0 writes them; the other processes use a stand-in that writes nothing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, TracebackType

import jax
import numpy as np
from tqdm import tqdm

from jaxpipe.distributed.log import has_terminal
from jaxpipe.drawing.pictures import heat_map
from jaxpipe.errors import TrainingError
from jaxpipe.files import whole_files, write_whole
from jaxpipe.training.run_folder import METRICS, TENSORBOARD

Number = float | None
ByLayer = Mapping[str, np.ndarray]  # "layer ..." by name
_SAY_EVERY_S = 30.0  # where there is no terminal for a bar


class MetricsWriter:
    """Writes a row of metrics for each step; a context manager, so that a failing run leaves complete files."""

    def __init__(self, path: Path, *, num_steps: int, first_step: int = 0):
        """Opens the files in `path` and the bar of `num_steps` steps, of which `first_step` are done.

        Rows of later steps, from a process that got further, are dropped: these steps run again.

        Raises:
            TrainingError: the files cannot be written.
        """
        # Imports torch if it is installed, which takes seconds; only the process that writes needs it.
        from jaxpipe.training.tensorboard import TensorBoard

        self._path = path
        with self._writing():
            # Before the file is opened for appending: `keep_rows` replaces it.
            num_damaged = keep_rows(path / METRICS, last_step=first_step)
            # Buffered by line, so that a killed process leaves at most one incomplete row.
            self._lines = (path / METRICS).open("a", buffering=1)
            self._tensorboard = TensorBoard(path / TENSORBOARD, first_step=first_step)
        self._bar = tqdm(
            total=num_steps,
            initial=first_step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5,
            disable=not has_terminal(),
        )
        self._num_steps = num_steps
        self._say_at = time.monotonic() + _SAY_EVERY_S
        if num_damaged:
            self.say(f"{METRICS}: {num_damaged} incomplete lines are dropped")

    def write(
        self,
        step: int,
        numbers: Mapping[str, Number],
        by_layer: ByLayer = MappingProxyType({}),
        *,
        has_row: bool = True,
    ) -> None:
        """Shows the metrics of `step`, counted from 1, and writes them; null for a number that is not finite.

        Args:
            by_layer: arrays, of which a row has the most and the least of each layer.
            has_row: whether they are written, not only shown.

        Raises:
            TrainingError: the disk is full, or the files have been removed.
        """
        # JSON has no NaN and no infinity, and TensorBoard draws neither.
        finite = {name: number for name, number in numbers.items() if number is not None and math.isfinite(number)}
        if has_row:
            row = {"step": step, **{name: finite.get(name) for name in numbers}}
            for name, array in by_layer.items():
                # Four decimals are enough for loads, and rows stay short with many layers.
                layers = array.reshape(len(array), -1).astype(float).round(4)
                for which, of_layers in (("most", layers.max(axis=1)), ("least", layers.min(axis=1))):
                    row[f"{name}_{which}"] = [value if math.isfinite(value) else None for value in of_layers.tolist()]
            with self._writing():
                self._lines.write(json.dumps(row, allow_nan=False) + "\n")
                self._tensorboard.write(step, finite)
        loss = f"{finite.get('loss', math.nan):.3f}"
        unit = "tokens" if "tokens_per_s" in numbers else "samples"
        speed = f"{numbers[f'{unit}_per_s']:.0f} {unit}/s"
        self._bar.set_postfix_str(f"loss {loss}, {speed}", refresh=False)
        self._bar.update(1)
        # Without a terminal there is no bar: a line now and then shows that the run lives.
        if self._bar.disable and time.monotonic() >= self._say_at:
            self.say(f"step {step} of {self._num_steps}: loss {loss}, {speed}")
            self._say_at = time.monotonic() + _SAY_EVERY_S

    def draw(self, step: int, by_layer: ByLayer) -> None:
        """Draws each array after `step` as NAME.png, in place of an earlier one; NAME is COLUMN_VALUE: expert_load.

        Raises:
            TrainingError: the disk is full, or the folder has been removed.
        """
        with self._writing():
            for name, array in by_layer.items():
                column, _, value = name.partition("_")
                picture = heat_map(
                    array.reshape(len(array), -1),
                    title=f"{column} {value}, step {step}",
                    column=column,
                    value=value.replace("_", " "),
                )
                write_whole(self._path / f"{name}.png", picture)

    def say(self, text: str) -> None:
        """Prints `text` above the progress bar."""
        self._bar.write(text)

    def __enter__(self) -> MetricsWriter:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the files and the bar."""
        self._bar.close()
        if error is not None:  # more useful than a second error while closing
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
                f"the metrics of the run in {self._path} cannot be written: {error.strerror}",
                rule=f"metrics-files: every step leaves a row in {METRICS} and in {TENSORBOARD}/",
                picture=f"{error.filename or self._path / METRICS}",
                repair=(
                    "make room or correct the permissions, then run the same command again: it resumes from the"
                    " newest checkpoint"
                ),
            ) from error


class SilentMetrics:
    """The stand-in for `MetricsWriter` in processes that do not write: its methods do nothing."""

    def __getattr__(self, method: str) -> Callable[..., None]:
        """A function that does nothing, for each method of the writer."""
        getattr(MetricsWriter, method)  # a typo is an error here, too
        return lambda *_, **__: None

    def __enter__(self) -> SilentMetrics:
        """Returns itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Does nothing."""


def open_metrics(path: Path, *, num_steps: int, first_step: int = 0) -> MetricsWriter | SilentMetrics:
    """The writer of this process: a `MetricsWriter` in process 0, a `SilentMetrics` in the others."""
    if jax.process_index() == 0:
        return MetricsWriter(path, num_steps=num_steps, first_step=first_step)
    return SilentMetrics()


def keep_rows(file: Path, *, last_step: int) -> int:
    """Keeps in `file`, if it exists, the rows of the steps up to `last_step`, unchanged; replaces the file whole.

    Args:
        file: a JSON object on each line, with an int "step".
        last_step: the step from whose state the run is resumed.

    Returns:
        Number of incomplete lines that are dropped too, such as the last one of a killed process.
    """
    if not file.exists():
        return 0
    num_damaged = 0
    # Bytes, not text: kept rows stay as they were, whatever their encoding.
    with file.open("rb") as old, whole_files([file]) as (new,):
        for line in old:
            step = _step_of(line)
            num_damaged += step is None
            if step is not None and step <= last_step:
                new.write(line)
    return num_damaged


def _step_of(line: bytes) -> int | None:
    """The step of a row; None if the line is incomplete."""
    # A row appended to a line without an end would make both unreadable, so such a line goes even if it is whole.
    if not line.endswith(b"\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (KeyError, TypeError, ValueError):
        return None
    return step if isinstance(step, int) else None
