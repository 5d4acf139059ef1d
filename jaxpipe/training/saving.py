"""Saves the states of a run; a checkpoint that cannot be written is said at once, and the next state is tried."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from jaxpipe.checkpoints import Checkpoints
from jaxpipe.errors import CheckpointError

PAUSES_S = (0, 10, 60, 300)  # before each further try; after the last the run ends


class Saver:
    """Saves states after the steps of a run, and tries again where one could not be written."""

    def __init__(self, checkpoints: Checkpoints, *, num_processes: int, say: Callable[[str], None]):
        """Saves nothing yet.

        Args:
            checkpoints: the run's checkpoints.
            num_processes: processes of the run. Several do not try again: a failure is known to one of them alone.
            say: takes the error of each try but the last.
        """
        self._checkpoints, self._num_processes, self._say = checkpoints, num_processes, say
        self._again_s: float | None = None  # when to try again, in seconds of time.monotonic

    def after_step(
        self,
        step: int,
        state: Any,
        *,
        is_due: bool,
        is_last: bool,
        config: dict[str, Any],
        heldout_loss: float | None,
    ) -> None:
        """Starts to save `state` if that is due, or if an earlier state could not be written; call it after every step.

        Args:
            step: number of steps done.
            state: the train state.
            is_due: whether the run saves after this step.
            is_last: whether no step follows; then this returns when the checkpoint is complete.
            config: config of the run, as JSON can hold it.
            heldout_loss: the newest held-out loss, or None.

        Raises:
            CheckpointError: all tries have failed, or the run has several processes.
        """
        while True:
            try:
                self._checkpoints.check()
                if is_due if self._again_s is None else is_last or time.monotonic() >= self._again_s:
                    self._again_s = None
                    self._checkpoints.save(step, state, config=config, heldout_loss=heldout_loss)
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
        """Seconds until the next try, which it says; raises `error` if there is none."""
        num_failed = self._checkpoints.num_failed
        if self._num_processes > 1 or num_failed > len(PAUSES_S):
            raise error
        pause_s = PAUSES_S[num_failed - 1]
        when = f"in {pause_s} s" if pause_s else "now"
        self._say(f"{error}\n  tried again {when} with the newest state; try {num_failed + 1} of {len(PAUSES_S) + 1}")
        return pause_s
