"""`--profile_steps=10:12`: a trace of these steps by jax's profiler, of each process into a folder of its own.

TensorBoard's profile plugin, XProf, and Perfetto show it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxpipe.errors import ConfigError

PROFILE = "profile"  # the folder of the traces, in the run's


@dataclass(frozen=True)
class ProfileSteps:
    """The steps to trace, both ends included, counted from 1 as in the metrics."""

    first: int
    last: int


def profile_steps(text: str, *, num_steps: int) -> ProfileSteps | None:
    """The steps that `--profile_steps` names; None where it is empty.

    Args:
        text: "FIRST:LAST", or one number.
        num_steps: of the run.

    Raises:
        ConfigError: no such text, or steps that the run does not have.

    Example:
        >>> profile_steps("10:12", num_steps=300)
        ProfileSteps(first=10, last=12)
        >>> profile_steps("", num_steps=300)
    """
    if not text:
        return None
    form = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    steps = ProfileSteps(int(form[1]), int(form[2] or form[1])) if form else None
    if steps is None or not 0 < steps.first <= steps.last <= num_steps:
        example = f"{min(10, num_steps)}:{min(12, num_steps)}"
        raise ConfigError(
            f"--profile_steps={text} cannot be traced\n"
            "  rule profile-steps: FIRST:LAST, both ends included, FIRST <= LAST, of the run's steps\n"
            f"      it has steps 1 to {num_steps}\n"
            f"  repair: give for example --profile_steps={example}, or leave it out"
        )
    return steps


def done_in_words(steps: ProfileSteps | None, num_done: int) -> str | None:
    """What to say where a run goes on behind steps that are to be traced, as a requeued command does; else None.

    Example:
        >>> done_in_words(ProfileSteps(2, 3), 12)
        'steps 2 to 3 are done: nothing is traced'
        >>> done_in_words(ProfileSteps(10, 14), 12)
        'steps 10 to 12 are done: steps 13 to 14 are traced'
    """
    if steps is None or steps.first > num_done:
        return None
    rest = f"steps {num_done + 1} to {steps.last} are traced" if steps.last > num_done else "nothing is traced"
    return f"steps {steps.first} to {min(steps.last, num_done)} are done: {rest}"


class Profiler:
    """Called around every step of the training loop; a context manager, so that a run that ends early has its trace."""

    def __init__(self, path: Path, steps: ProfileSteps | None):
        """Starts nothing yet.

        Args:
            path: the run's folder.
            steps: to trace, of those that the run still does; None traces nothing.
        """
        self._folder, self._steps = path / PROFILE / f"process_{jax.process_index():04d}", steps
        self._annotation: Any = None
        self._first_traced: int | None = None

    def before(self, step: int) -> None:
        """Starts the trace at the first step to trace that comes here; the steps have their numbers in it."""
        if self._steps is None or not self._steps.first <= step <= self._steps.last:
            return
        if self._first_traced is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder)
            self._first_traced = step
        self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
        self._annotation.__enter__()

    def after(self, step: int) -> str | None:
        """Ends and writes the trace if `step`, whose numbers have arrived, is its last; then what to say of it."""
        first = self._first_traced
        if first is None or self._steps is None:
            return None
        self._end_annotation()
        if step < self._steps.last:
            return None
        self._stop()
        return f"step {step}: trace of steps {first} to {self._steps.last} in {self._folder}"

    def __enter__(self) -> Profiler:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes a trace that has been started."""
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
