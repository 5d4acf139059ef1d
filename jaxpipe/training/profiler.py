"""`--profile_steps=10:12`: traces these steps with JAX's profiler, each process into a folder of its own.

TensorBoard's profile plugin (XProf) and Perfetto show the traces.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxpipe.errors import ConfigError

PROFILE = "profile"  # folder of the traces, in the run's folder


def profile_steps(text: str, *, num_steps: int) -> range:
    """The steps that `--profile_steps` names, counted from 1 as in the metrics; none if it is empty.

    Args:
        text: "FIRST:LAST", or one number.

    Raises:
        ConfigError: the text has another form, or the run does not have these steps.

    Example:
        >>> profile_steps("10:12", num_steps=300)
        range(10, 13)
    """
    if not text:
        return range(0)
    # At most nine digits: Python refuses to read numbers of thousands of digits.
    form = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    steps = range(int(form[1]), int(form[2] or form[1]) + 1) if form else range(0)
    if not steps or steps[0] < 1 or steps[-1] > num_steps:
        example = f"{min(10, num_steps)}:{min(12, num_steps)}"
        raise ConfigError(
            f"--profile_steps={text} cannot be traced",
            rule="profile-steps: FIRST:LAST, both ends included, FIRST <= LAST, of the run's steps",
            picture=f"it has steps 1 to {num_steps}",
            repair=f"give for example --profile_steps={example}, or leave it out",
        )
    return steps


def format_done(steps: range, num_done: int) -> str | None:
    """The message of a resumed run if some of the steps to trace are already done; else None.

    Example:
        >>> format_done(range(2, 4), 12)
        'steps 2 to 3 are done: nothing is traced'
        >>> format_done(range(10, 15), 12)
        'steps 10 to 12 are done: steps 13 to 14 are traced'
    """
    if not steps or steps[0] > num_done:
        return None
    rest = f"steps {num_done + 1} to {steps[-1]} are traced" if steps[-1] > num_done else "nothing is traced"
    return f"steps {steps[0]} to {min(steps[-1], num_done)} are done: {rest}"


class Profiler:
    """Traces steps of the training loop; a context manager, so that a run that ends early keeps its trace."""

    def __init__(self, path: Path, steps: range):
        """Prepares the profiler; it starts at the first step to trace.

        Args:
            steps: steps to trace, as far as the run still executes them.
        """
        # A folder for each process: each traces its own devices.
        self._folder = path / PROFILE / f"process_{jax.process_index():04d}"
        self._steps = steps
        self._annotation: Any = None
        self._first_traced: int | None = None

    def before(self, step: int) -> None:
        """Starts the trace at the first step to trace, and marks the step with its number."""
        if step not in self._steps:
            return
        # A resumed run may begin within them, so the first step seen starts the trace.
        if self._first_traced is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder)
            self._first_traced = step
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        # Entered by hand: the step lies between two calls, where no `with` can stand.
        self._annotation.__enter__()

    def after(self, step: int) -> str | None:
        """Ends and writes the trace if `step` is the last one to trace, and returns a report; else returns None.

        The metrics of `step` must have arrived on the host.
        """
        first = self._first_traced
        if first is None:
            return None
        self._end_annotation()
        if step < self._steps[-1]:
            return None
        self._stop()
        return f"step {step}: trace of steps {first} to {self._steps[-1]} in {self._folder}"

    def __enter__(self) -> Profiler:
        """Returns itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes the trace if one has been started."""
        self._end_annotation()
        if self._first_traced is not None:
            self._stop()

    def _stop(self) -> None:
        self._first_traced = None
        jax.profiler.stop_trace()

    def _end_annotation(self) -> None:
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
