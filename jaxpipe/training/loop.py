"""The loop over the steps of a run: train, evaluate, write metrics and checkpoints, stop on a signal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from jaxpipe.checkpoints import Checkpoints
from jaxpipe.distributed.log import print_with, say
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.training.batches import local_rows, put_batch
from jaxpipe.training.metrics import open_metrics
from jaxpipe.training.profiler import Profiler
from jaxpipe.training.setup import Setup
from jaxpipe.training.skipped import SkippedSteps
from jaxpipe.training.speed import Speed
from jaxpipe.training.step import TrainState, format_losses, name_losses


@dataclass(frozen=True)
class Loop:
    """The loop over the steps, in one of the processes of a run.

    Attributes:
        config: the checked config.
        path: the run's folder.
        processes: all processes of the run.
        setup: text, model and pipeline of the config.
        checkpoints: the run's checkpoints.
        profiler: traces the steps of --profile_steps.
        train_step: compiled, (state, batch) -> (state, metrics).
        eval_step: compiled, (params, batch) -> sum of losses.
    """

    config: ConfigDict
    path: Path
    processes: ProcessGroup
    setup: Setup
    checkpoints: Checkpoints
    profiler: Profiler
    train_step: Callable[[TrainState, Any], tuple[TrainState, dict[str, jax.Array]]]
    eval_step: Callable[[Any, Any], Any]

    def run(self, state: TrainState, *, num_done: int) -> int:
        """Runs the steps after `num_done` to the last, or until a signal stops the run after a step.

        Args:
            state: the train state after `num_done` steps; donated.
            num_done: number of steps done before.

        Returns:
            Number of steps done now.

        Raises:
            TrainingError: too many steps in a row are not finite, or the metrics cannot be written.
            CheckpointError: a checkpoint cannot be written.
            DataError: a file holds tokens outside the model's vocabulary.
        """
        config, pipeline, num_steps = self.config, self.setup.pipeline, self.config.train.steps
        speed = Speed(self.setup.model, pipeline, self.setup.train_batches.at(0))
        skipped_steps = SkippedSteps(pipeline, max_in_row=config.train.max_skipped_in_row)
        rows = local_rows(pipeline, config.data.batch_size // config.pipeline.num_microbatches)
        with (
            closing(self.setup.train_batches.following(num_done, rows)) as batches,
            open_metrics(self.path, num_steps=num_steps, first_step=num_done) as metrics,
        ):
            print_with(metrics.say)
            for step in range(num_done + 1, num_steps + 1):
                # ---- One step
                self.processes.begin(f"step {step}", is_step=True)
                self.profiler.before(step)
                start = time.perf_counter()
                state, found = self.train_step(state, put_batch(pipeline, next(batches), rows))
                found = jax.device_get(found)
                numbers = {name: found[name].item() for name in ("loss", *found)}
                numbers |= speed.numbers(time.perf_counter() - start)
                if traced := self.profiler.after(step):
                    say(traced)
                stops = self.processes.stops_after_step()

                # ---- Held-out loss, every train.eval_every steps and at the end
                if step == num_steps or step % config.train.eval_every == 0:
                    heldout = self._heldout(step, state)
                    say(f"step {step}: held-out {format_losses(heldout)}; {speed.format_spread()}")
                    numbers |= heldout | speed.spread()
                metrics.write(step, numbers)
                if skipped := skipped_steps.check(step, numbers, state.params):
                    say(skipped.text)

                # ---- Checkpoint, written in the background
                are_params_good = not (skipped and skipped.are_params_bad)
                if (stops or self._saves_after(step)) and are_params_good:
                    self._save(step, state, heldout_loss=numbers.get("eval_loss"))
                if stops:
                    return step
        return num_steps

    def _heldout(self, step: int, state: TrainState) -> dict[str, float]:
        self.processes.begin(f"the evaluation after step {step}")
        return heldout_losses(self.eval_step, self.setup, state.params, num_batches=self.config.train.eval_batches)

    def _saves_after(self, step: int) -> bool:
        checkpoint = self.config.checkpoint
        if step == self.config.train.steps:
            return checkpoint.save_at_end
        return checkpoint.save_every > 0 and step % checkpoint.save_every == 0

    def _save(self, step: int, state: TrainState, *, heldout_loss: float | None) -> None:
        self.processes.begin(f"the checkpoint of step {step}")
        self.checkpoints.save(step, state, config=self.config.to_dict(), heldout_loss=heldout_loss)


def heldout_losses(
    eval_step: Callable[[Any, Any], Any], setup: Setup, params: Any, *, num_batches: int
) -> dict[str, float]:
    """The held-out loss of staged `params` in nats: the mean over all terms of the first `num_batches` batches.

    Returns:
        "eval_loss" and, if there are several kinds of loss, the mean of each.
    """
    sums, nums = [], []
    for batch in setup.heldout_batches.first(num_batches):
        sums.append(eval_step(params, put_batch(setup.pipeline, batch)))
        nums.append(setup.model.num_losses(batch))
    means = jax.tree.map(lambda total, num: float(total / max(num, 1)), _total(sums), _total(nums))
    return name_losses(means, prefix="eval_")


def _total(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.sum(np.asarray(leaves, np.float64)), *trees)
