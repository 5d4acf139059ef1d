"""The checkpoints of a run: written in the background, deleted by a rule, restored from the newest undamaged one.

No checkpoint is deleted before a newer one is complete. A damaged one is never deleted, but set aside. An error of
writing is said at once, and the next state is tried.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxpipe.checkpoints import files
from jaxpipe.checkpoints.arrays import read_arrays, shapes, write_checkpoint
from jaxpipe.checkpoints.average import AVERAGE, AveragedState, average_in
from jaxpipe.checkpoints.checks import check_same, not_written
from jaxpipe.checkpoints.files import Keep
from jaxpipe.checkpoints.reading import Choice, read_newest, read_whole
from jaxpipe.checkpoints.state import StateForm
from jaxpipe.errors import CheckpointError
from jaxpipe.program import Pipeline

_OLDER = "older."  # in the names of arrays


class Checkpoints:
    """The checkpoints in one folder, for the train states of one pipeline.

    All processes of a run create one and call its methods in the same order. On leaving its context, the last
    checkpoint is complete.
    """

    def __init__(
        self,
        folder: Path,
        *,
        pipeline: Pipeline,
        keep: Keep,
        read_only: bool = False,
        say: Callable[[str], None] = print,
    ):
        """Deletes half-written checkpoints of killed processes from `folder`, unless it is read only.

        Args:
            folder: folder of the checkpoints, which all processes see; made with the first checkpoint.
            read_only: whether nothing is written, deleted or set aside.
            say: takes messages: in every process about checkpoints passed over, in process 0 about those set aside.
        """
        self.folder = folder
        self._pipeline = pipeline
        self._keep = keep
        self._read_only = read_only
        self._say = say
        self._form: StateForm | None = None
        self._in_flight: tuple[Path, ocp.AsyncCheckpointer] | None = None  # the checkpoint being written, and by what
        self.num_failed = 0  # checkpoints in a row that could not be written
        self._last: int | None = None  # the step that was saved or restored last
        if not read_only:
            self._clean()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as failed:
            # Another error is under way already, and must not be hidden by this one.
            if error is None:
                raise
            self._say(str(failed))

    def steps(self) -> list[int]:
        """Steps whose checkpoints are complete, ascending."""
        return files.complete_steps(self.folder)

    def save(self, step: int, state: Any, *, config: dict[str, Any], heldout_loss: float | None = None) -> None:
        """Starts to write the checkpoint of `step`; `state` may be donated when this returns.

        Does nothing if `step` was saved or restored last. Any other checkpoint of this step, or of
        a later one, belongs to an abandoned course of the run and is set aside.

        Args:
            step: number of batches consumed.

        Raises:
            CheckpointError: this checkpoint or the one before it cannot be written.
        """
        assert not self._read_only
        self.wait()
        # A run that ends after a saved step would write the same state again.
        if step == self._last:
            return
        self._last = step
        folder = self.folder / str(step)
        try:
            self._set_aside([later for later in self.steps() if later >= step], "replaced")
            arrays = self._form_of(state).to_arrays(state)
            self._in_flight = folder, write_checkpoint(folder, arrays, config=config, heldout_loss=heldout_loss)
        except Exception as error:
            raise self._failed(folder, error) from error

    def check(self) -> None:
        """Returns at once, unless the checkpoint in flight has failed already."""
        if self._in_flight is not None:
            folder, checkpointer = self._in_flight
            try:
                checkpointer.check_for_errors()
            except Exception as error:
                raise self._failed(folder, error) from error

    def wait(self) -> None:
        """Returns when the last checkpoint is complete and those that need not be kept are deleted."""
        if self._in_flight is None:
            return
        folder, checkpointer = self._in_flight
        try:
            checkpointer.close()
        except Exception as error:
            raise self._failed(folder, error) from error
        self._in_flight = None
        self.num_failed = 0
        # One process deletes; the others would race with it.
        if jax.process_index() == 0:
            for step, reasons in self._keep.reasons(files.heldout_losses(self.folder)).items():
                if not reasons:
                    files.delete(self.folder, step)

    def restore(self, like: Any, step: int | None = None) -> tuple[int, Any]:
        """Returns the step and the state of a checkpoint: the newest undamaged one, or that of `step`.

        One of a schedule with flush lacks what one without needs of the step before: its `older` is None. Where the run
        kept no average of the weights and now keeps one, that begins at the weights of the checkpoint.

        A checkpoint that the run of this folder deletes meanwhile is passed over.

        Args:
            like: the state's ShapeDtypeStructs with shardings.
            step: step of the checkpoint; None takes the newest undamaged one, and sets damaged ones aside.

        Raises:
            CheckpointError: all complete checkpoints are damaged, or that of `step` is.
            ConfigError: there is no checkpoint, or it has another model or optimizer.
        """
        self.wait()
        form = self._form_of(like)

        def read(chosen: Choice) -> tuple[int, Any]:
            folder = chosen.folder
            saved = read_whole(folder, lambda: shapes(folder))
            there = _as_saved(like, saved)
            wanted = form if there is like else StateForm(there, like.params, self._pipeline)
            check_same(saved, wanted.shapes, folder=folder)
            # Only now: the state that was read is of the right model, so what is set aside is not needed.
            if not self._read_only:
                self._set_aside(chosen.damaged, "damaged")
            state = wanted.to_state(lambda leaves: read_whole(folder, lambda: read_arrays(folder, leaves)))
            return chosen.step, _with_average_of(like, state, self._pipeline)

        self._last, state = read_newest(self.folder, read, step=step, say=self._say)
        return self._last, state

    def _form_of(self, like: Any) -> StateForm:
        self._form = self._form or StateForm(like, like.params, self._pipeline)
        return self._form

    def _set_aside(self, steps: Iterable[int], why: str) -> None:
        if jax.process_index() == 0:
            for step in sorted(steps):
                self._say(f"checkpoint of step {step} is set aside as {files.set_aside(self.folder, step, why).name}")

    def _failed(self, folder: Path, error: Exception) -> CheckpointError:
        """The error to raise; deletes the partial checkpoint, since the disk may be full."""
        # Both: neither may a later `wait` finish this one, nor `save` of the same step be passed over.
        self._in_flight = self._last = None
        self.num_failed += 1
        self._clean()
        if isinstance(error, CheckpointError):
            return CheckpointError(str(error))
        return not_written(folder, error, self.steps())

    def _clean(self) -> None:
        if jax.process_index() == 0:
            for path in files.unfinished(self.folder):
                shutil.rmtree(path, ignore_errors=True)


def _as_saved(like: Any, saved: Iterable[str]) -> Any:
    """`like` as a checkpoint with arrays of the names `saved` has it: with or without W(t-1), and an average."""
    has_older, has_average = (any(name.startswith(kind) for name in saved) for kind in (_OLDER, AVERAGE))
    # Without flush a state has the weights of the step before; a checkpoint of a schedule with flush lacks them.
    if like.older and not has_older:
        like = replace(like, older=None)
    if has_average == (average_in(like.optimizer) is not None):
        return like
    # `()` has no arrays, so none of the average is read.
    optimizer = AveragedState((), like.optimizer) if has_average else like.optimizer.inner
    return replace(like, optimizer=optimizer)


def _with_average_of(like: Any, state: Any, pipeline: Pipeline) -> Any:
    """A `state` that was read as `_as_saved` says, with an average if `like` has one."""
    is_averaged = average_in(like.optimizer) is not None
    was_averaged = average_in(state.optimizer) is not None
    if is_averaged == was_averaged:
        return state
    if was_averaged:
        return replace(state, optimizer=state.optimizer.inner)
    return replace(
        state, optimizer=AveragedState(jax.tree.map(jnp.copy, pipeline.trained(state.params)), state.optimizer)
    )


PAUSES_S = (0, 10, 60, 300)  # before each further try; after the last the run ends


class Saver:
    """Saves states after the steps of a run, and tries again where one could not be written."""

    def __init__(self, checkpoints: Checkpoints, *, num_processes: int, say: Callable[[str], None]):
        """Saves nothing yet.

        Args:
            num_processes: processes of the run. Several do not try again: a failure is known to one of them alone.
            say: takes the error of each try but the last.
        """
        self._checkpoints = checkpoints
        self._num_processes = num_processes
        self._say = say
        self._again_s: float | None = None  # when to try again, in seconds of time.monotonic

    def after_step(
        self,
        step: int,
        state: Callable[[], Any],
        *,
        is_due: bool,
        is_last: bool,
        config: dict[str, Any],
        heldout_loss: float | None,
    ) -> None:
        """Starts to save a state if that is due, or if an earlier one could not be written; call it after every step.

        Args:
            is_last: whether no step follows; then this returns when the checkpoint is complete.

        Raises:
            CheckpointError: all tries have failed, or the run has several processes.
        """
        while True:
            try:
                self._checkpoints.check()
                # After a failure every step is a try whose pause is over, whether it is due or not.
                if is_due if self._again_s is None else is_last or time.monotonic() >= self._again_s:
                    self._again_s = None
                    self._checkpoints.save(step, state(), config=config, heldout_loss=heldout_loss)
                if is_last:
                    self._checkpoints.wait()
                return
            except CheckpointError as error:
                pause_s = self._pause_s(error)
            self._again_s = time.monotonic() + pause_s
            if is_last:
                time.sleep(pause_s)
            elif pause_s:
                return

    def _pause_s(self, error: CheckpointError) -> int:
        """Seconds until the next try, which are said; raises `error` if there is none."""
        num_failed = self._checkpoints.num_failed
        if self._num_processes > 1 or num_failed > len(PAUSES_S):
            raise error
        # - 1: the first failure takes the first pause.
        pause_s = PAUSES_S[num_failed - 1]
        when = f"in {pause_s} s" if pause_s else "now"
        self._say(f"{error}\n  tried again {when} with the newest state; try {num_failed + 1} of {len(PAUSES_S) + 1}")
        return pause_s
