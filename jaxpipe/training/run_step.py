"""One interface for the train steps of a run, of schedules with and without flush; and the step of those with one.

A loop calls `init` once, then the step for each batch, and `flush` before it keeps or saves the state. Only the step
itself knows what it has in flight between two calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from jaxpipe.lowering import RoundTable
from jaxpipe.program import Pipeline
from jaxpipe.program.shapes import StepShapes
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.training.step import TrainState


class Step(Protocol):
    """A train step."""

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of one batch with a flush: layout, parts and evaluation."""
        ...

    @property
    def schedule(self) -> Schedule:
        """The schedule of the run; without flush it is of several batches."""
        ...

    @property
    def table(self) -> RoundTable:
        """The round table that a call executes."""
        ...

    def shapes(self, params: Any, batch: Any, *, random: bool = True) -> StepShapes:
        """Every shape of a call on one device; arguments and errors are those of `Pipeline.shapes`."""
        ...

    def init(self, state: TrainState) -> TrainState:
        """The state with previous weights equal to the current ones if the schedule has delays; traceable.

        A state that has previous weights keeps them; a step with a flush drops them.
        """
        ...

    def __call__(self, state: TrainState, take: Callable[[], Any]) -> tuple[TrainState, dict[str, Any]]:
        """Does the next step; the state is donated.

        Args:
            state: from `init` or from the call before.
            take: returns the batches in turn, from that of this step on; a step may take the one after, too.

        Returns:
            The state, and the metrics of this step: see `make_train_step`.
        """
        ...

    def flush(self, state: TrainState) -> TrainState:
        """The state as a checkpoint holds it and `init` takes it, with what is in flight that a run needs to go on."""
        ...

    def between_calls(self, state: TrainState) -> TrainState:
        """The state, or its shapes, as it is between two calls, without what is in flight."""
        ...

    def lower(self, state: TrainState, batch: Any) -> Step:
        """Traces its programs; returns the step, which `compile` finishes."""
        ...

    def compile(self, compiler_options: dict[str, Any] | None = None) -> Step:
        """Compiles what `lower` has traced, with options of XLA by name."""
        ...

    def memory_analysis(self) -> Any:
        """Bytes of a compiled call, as XLA counts them."""
        ...

    def as_text(self) -> str:
        """The optimized HLO of a compiled call."""
        ...


@dataclass
class StepWithFlush:
    """The step of a schedule with a flush: a call begins and ends with an empty pipeline.

    Attributes:
        function: what `make_train_step` returns, then lowered, then compiled.
    """

    pipeline: Pipeline
    function: Any

    @property
    def schedule(self) -> Schedule:
        """The schedule of every batch."""
        return self.pipeline.schedule

    @property
    def table(self) -> RoundTable:
        """The round table of the schedule."""
        return self.pipeline.table

    def shapes(self, params: Any, batch: Any, *, random: bool = True) -> StepShapes:
        """The shapes of the pipeline."""
        return self.pipeline.shapes(params, batch, random=random)

    def init(self, state: TrainState) -> TrainState:
        """The state without weights of the step before."""
        return replace(state, older=None)

    def __call__(self, state: TrainState, take: Callable[[], Any]) -> tuple[TrainState, dict[str, Any]]:
        """Does the step of the next batch, the only one that it takes."""
        return self.function(state, take())

    def flush(self, state: TrainState) -> TrainState:
        """The state as it is: nothing is in flight."""
        return state

    def between_calls(self, state: TrainState) -> TrainState:
        """The state as it is."""
        return state

    def lower(self, state: TrainState, batch: Any) -> StepWithFlush:
        """Traces the program."""
        self.function = self.function.lower(state, batch)
        return self

    def compile(self, compiler_options: dict[str, Any] | None = None) -> StepWithFlush:
        """Compiles the program."""
        self.function = self.function.compile(compiler_options)
        return self

    def memory_analysis(self) -> Any:
        """Bytes of the compiled program, as XLA counts them."""
        return self.function.memory_analysis()

    def as_text(self) -> str:
        """The optimized HLO of the program."""
        return self.function.as_text()
