"""The loop over the steps of a run: train, evaluate, write metrics and checkpoints, stop on a signal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.checkpoints import CHECKPOINTS, Checkpoints
from jaxpipe.checkpoints.checkpoints import Saver
from jaxpipe.config.base import RunConfig
from jaxpipe.distributed.gloo import tune_gloo
from jaxpipe.distributed.log import printing_with, say
from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.errors import TrainingError
from jaxpipe.program import Pipeline
from jaxpipe.training.batches import local_rows, put_batch
from jaxpipe.training.metrics import open_metrics
from jaxpipe.training.profiler import Profiler
from jaxpipe.training.run_step import Step
from jaxpipe.training.setup import Setup
from jaxpipe.training.speed import Speed
from jaxpipe.training.step import TrainState, format_losses, name_losses

OnStep = Callable[[int, dict[str, float], TrainState], object]
_NUMBER = jax.tree.structure(0)


@dataclass(frozen=True)
class Loop:
    """The loop over the steps, in one of the processes of a run.

    Attributes:
        setup: what the run does, its text, model and pipeline.
        train_step: compiled.
        eval_step: compiled, (params, batch) -> sum of losses.
        on_step: called after each step; see `jaxpipe.training.fit`.
    """

    path: Path
    processes: ProcessGroup
    setup: Setup
    checkpoints: Checkpoints
    profiler: Profiler
    train_step: Step
    eval_step: Callable[[Any, Any], Any]
    on_step: OnStep | None = None

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return self.setup.spec.config

    def run(self, state: TrainState, *, num_done: int) -> tuple[TrainState, int]:
        """Runs the steps after `num_done` to the last, or until a signal or `on_step` stops the run after a step.

        Args:
            state: the train state after `num_done` steps; donated.
            num_done: number of steps done before.

        Returns:
            The state now, and the number of steps done.

        Raises:
            TrainingError: too many steps in a row are not finite, or the metrics cannot be written.
            CheckpointError: a checkpoint cannot be written.
            DataError: a file holds tokens outside the model's vocabulary.
        """
        config = self.config
        pipeline = self.setup.pipeline
        num_steps = config.train.steps
        task = self.setup.task
        speed = Speed(task.model, pipeline, task.train_batches.at(0))
        has_kept = False
        has_flush = not self.train_step.schedule.delays
        skipped_steps = SkippedSteps(pipeline, max_in_row=config.train.max_skipped_in_row, has_flush=has_flush)
        saver = Saver(self.checkpoints, num_processes=self.processes.count, say=say)
        rows = local_rows(pipeline, config.data.batch_size // config.pipeline.num_microbatches)

        def take() -> Any:
            # A schedule without flush takes batches ahead of its steps, so the step itself decides when to take one.
            return put_batch(pipeline, next(batches), rows)

        with (
            # Closes the generator even on an error, so that its reading thread ends with the run.
            closing(task.train_batches.following(num_done, rows)) as batches,
            open_metrics(self.path, num_steps=num_steps, first_step=num_done) as metrics,
            printing_with(metrics.say),
        ):
            for step in range(num_done + 1, num_steps + 1):
                # ---- One step
                self.processes.begin(f"step {step}", is_step=True)
                self.profiler.before(step)
                start = time.perf_counter()
                state, of_step = self.train_step(state, take)
                # Waits for the step: without its numbers on the host the time below would be that of a dispatch.
                of_step = jax.device_get(of_step)
                if step == num_done + 1 and self.processes.count > 1:
                    tune_gloo()  # the first step has connected the processes
                # The loss first, as the leftmost column of the rows.
                numbers = {name: of_step[name].item() for name in ("loss", *of_step) if not of_step[name].ndim}
                by_layer = {name: array for name, array in of_step.items() if array.ndim}
                numbers |= speed.numbers(time.perf_counter() - start)
                if traced := self.profiler.after(step):
                    say(traced)
                # All processes must stop after the same step, or the others wait forever in a collective.
                stops = self.processes.stops_after_step()

                # ---- Held-out loss, every train.eval_every steps and at the end
                if step == num_steps or step % config.train.eval_every == 0:
                    heldout = self._heldout(step, state)
                    # An evaluation that found no term is still told; without held-out data there is nothing to tell.
                    if heldout or any(True for _ in task.heldout_batches.first(1)):
                        losses = format_losses(heldout, unit=task.loss_unit)
                        say(f"step {step}: held-out {losses}; {speed.format_spread()}")
                    numbers |= heldout | speed.spread()
                    metrics.draw(step, by_layer)
                is_finite = all(math.isfinite(number) for number in numbers.values() if number is not None)
                is_due = step % config.train.log_every == 0 or "eval_loss" in numbers or step == num_steps
                # A step that is not finite always leaves a row: it is what a user looks for.
                metrics.write(step, numbers, by_layer, has_row=is_due or not is_finite)
                if skipped := skipped_steps.check(step, numbers, state.params):
                    say(skipped.text)
                if self.on_step is not None:
                    self.processes.begin(f"on_step after step {step}")
                    # Counted before and after the call: whoever keeps an array raises its count.
                    num_references = _num_references(state)
                    # A tree of its own: whoever keeps a part of it holds arrays.
                    stops = bool(self.on_step(step, numbers, jax.tree.map(lambda leaf: leaf, state))) or stops
                    state, num_kept = _apart_from_kept(state, num_references)
                    if num_kept and not has_kept:
                        has_kept = True
                        say(f"step {step}: on_step keeps {num_kept} arrays of the state; the run goes on with copies")

                # ---- Checkpoint, written in the background
                # A checkpoint with parameters that are not finite would only push a good one out of `keep_last`.
                are_params_good = not (skipped and skipped.are_params_bad)
                if are_params_good:
                    self._save(saver, step, state, stops=stops, heldout_loss=numbers.get("eval_loss"))
                if stops:
                    return state, step
        return state, num_steps

    def _heldout(self, step: int, state: TrainState) -> dict[str, float]:
        self.processes.begin(f"the evaluation after step {step}")
        num_batches = self.config.train.eval_batches
        losses = heldout_losses(self.eval_step, self.setup, state.params, num_batches=num_batches)
        if state.average is None:
            return losses
        of_average = heldout_losses(self.eval_step, self.setup, state.average, num_batches=num_batches)
        return losses | {name.replace("eval_", "eval_average_", 1): loss for name, loss in of_average.items()}

    def _saves_after(self, step: int) -> bool:
        checkpoint = self.config.checkpoint
        is_due = checkpoint.save_every > 0 and step % checkpoint.save_every == 0
        return is_due or (checkpoint.save_at_end and step == self.config.train.steps)

    def _save(self, saver: Saver, step: int, state: TrainState, *, stops: bool, heldout_loss: float | None) -> None:
        is_due = stops or self._saves_after(step)
        is_last = stops or step == self.config.train.steps
        if is_due or is_last:  # the last one waits for what is in flight
            self.processes.begin(f"the checkpoint of step {step}", waits_for_files=True)
        saver.after_step(
            step,
            lambda: self.train_step.flush(state),
            is_due=is_due,
            is_last=is_last,
            config=self.config.to_dict(),
            heldout_loss=heldout_loss,
        )


# Arrays of a state that `on_step` keeps, which the next step would donate


def _num_references(state: TrainState) -> list[int]:
    """[leaf] how often Python refers to each array."""
    # Counts include those of this list; both calls make it alike, so the comparison holds.
    return [sys.getrefcount(leaf) for leaf in jax.tree.leaves(state)]


def _apart_from_kept(state: TrainState, before: Sequence[int]) -> tuple[TrainState, int]:
    """`state` with copies of the arrays to which there are more references than before, and their number."""
    is_kept = [now > then for now, then in zip(_num_references(state), before, strict=True)]
    if not any(is_kept):
        return state, 0
    # The run goes on with the copies. The kept arrays must not be donated.
    leaves, structure = jax.tree.flatten(state)
    apart = [_copy(leaf) if kept else leaf for leaf, kept in zip(leaves, is_kept, strict=True)]
    return jax.tree.unflatten(structure, apart), sum(is_kept)


def _copy(array: jax.Array) -> jax.Array:
    """A copy on the same devices; each process copies its own parts."""
    # `jnp.copy` of the whole array would be a computation over all processes, which only some may need.
    parts = [jnp.copy(shard.data) for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def heldout_losses(
    eval_step: Callable[[Any, Any], Any], setup: Setup, params: Any, *, num_batches: int
) -> dict[str, float]:
    """The held-out loss of staged `params` in nats: the mean over all terms of the first `num_batches` batches.

    Returns:
        "eval_loss" and, if there are several kinds of loss, the mean of each; empty if there are no batches. A mean of
        no terms is left out, as is what is measured in every layer, and losses that the model has in training alone.
    """
    sums = []
    nums = []
    for batch in setup.task.heldout_batches.first(num_batches):
        losses = eval_step(params, put_batch(setup.pipeline, batch))
        num = setup.task.model.num_losses(batch)
        for name in getattr(setup.task.model, "training_losses", ()):
            del losses[name], num[name]
        sums.append(losses)
        # One number counts for all kinds of loss; a tree has a number for each.
        nums.append(jax.tree.map(lambda _, num=num: num, losses) if jax.tree.structure(num) == _NUMBER else num)
    if not sums:
        return {}
    num_terms = _total(nums)
    # A kind of loss without terms has the sum 0; its mean is left out below.
    means = jax.tree.map(lambda total, num: total / (num if num > 0 else 1), _total(sums), num_terms)
    named = name_losses(means, prefix="eval_")
    nums_of = name_losses(num_terms, prefix="eval_")
    return {name: float(mean) for name, mean in named.items() if not mean.ndim and nums_of[name] > 0}


def _total(trees: list[Any]) -> Any:
    # Float64: sums of many batches would lose digits in float32.
    return jax.tree.map(lambda *leaves: np.sum(np.asarray(leaves, np.float64), axis=0), *trees)


# Skipped steps, whose loss or gradients are not finite: their report, and the error that ends the run


def parameter_names(params: Any) -> list[str]:
    """The path of every parameter, in the order of `jax.tree.leaves`.

    Example:
        >>> parameter_names({"shared": {"bias": 0}, "layers": {"up": {"kernel": 0, "bias": 0}}})
        ['layers.up.bias', 'layers.up.kernel', 'shared.bias']
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]


@dataclass(frozen=True)
class Skipped:
    """A skipped step.

    Attributes:
        text: the report of the step.
        are_params_bad: whether a parameter itself is not finite or too large to square, so that a checkpoint would be
            useless. If not, the parameters are those of the last good step.
    """

    text: str
    are_params_bad: bool


class SkippedSteps:
    """Checks the metrics of every step, and the parameters after a skipped step."""

    def __init__(self, pipeline: Pipeline, *, max_in_row: int, has_flush: bool = True):
        """Compiles nothing until a step is skipped.

        Args:
            max_in_row: number of consecutive skipped steps at which the run ends.
            has_flush: whether the schedule has one; without, some updates of a skipped step are made.
        """
        # The step's norm takes these sums, too: a parameter whose square overflows is bad for it, too.
        self._square_sums = jax.jit(pipeline.square_sums)
        self._trained = pipeline.trained
        self._max_in_row = max_in_row
        self._has_flush = has_flush

    def check(self, step: int, numbers: Mapping[str, float], params: Any) -> Skipped | None:
        """The report of a skipped step; None for a step that was not skipped.

        All processes must call it, since they inspect the parameters together.

        Args:
            step: counted from 1.
            numbers: the metrics of `make_train_step`, as numbers.
            params: staged parameters after the step.

        Raises:
            TrainingError: too many steps in a row are skipped.
        """
        if not numbers["skipped"]:
            return None
        num_in_row = int(numbers["num_skipped_in_row"])
        values = f"loss {numbers['loss']:.4g}, gradient norm {numbers['grad_norm']:.4g}"
        culprit, are_params_bad = self._culprit(numbers, params)
        if num_in_row < self._max_in_row:
            return Skipped(f"step {step}: skipped, {num_in_row} in a row; {values}; {culprit}", are_params_bad)
        last_good = step - num_in_row
        kept = f"parameters and optimizer are as step {last_good} left them"
        if not self._has_flush:
            kept += ", but for stages whose gradients were finite"
        raise TrainingError(
            f"step {step}: loss or gradients are not finite, {num_in_row} steps in a row",
            rule=f"finite-numbers: a run ends after train.max_skipped_in_row={self._max_in_row} such steps",
            picture=f"{values}\n{culprit}\n{kept}",
            repair=f"{_repair(last_good, are_params_bad=are_params_bad)}",
        )

    def _culprit(self, numbers: Mapping[str, float], params: Any) -> tuple[str, bool]:
        """The first parameter that is bad itself, or else whose gradient is; and whether a parameter is bad itself."""
        names = parameter_names(params)
        # One reduction over all parameters on the devices; the host sees a number for each.
        of_params = ~np.isfinite(np.asarray(self._square_sums(params)))
        if of_params.any():
            name = names[int(of_params.argmax())]
            return f"first bad parameter: {name}, itself not finite or too large to square", True
        # -1 means that no gradient is bad: then the loss alone was not finite.
        if numbers["bad_parameter"] >= 0:
            names = parameter_names(self._trained(params))  # gradients are of these alone
            return f"first bad parameter: {names[int(numbers['bad_parameter'])]}, by its gradient", False
        return "the gradient of every parameter is finite", False


def _repair(last_good: int, *, are_params_bad: bool) -> str:
    """The repair, given that the parameters are those of step `last_good`."""
    if are_params_bad and last_good == 0:
        return "the run began with these parameters: name another checkpoint.init_from"
    away = (
        f"{CHECKPOINTS}/{last_good}, if it is there, holds these parameters: move it"
        if are_params_bad
        else f"resume from before the trouble: move the newest folders of {CHECKPOINTS}/"
    )
    return (
        f"{away} out of the run's folder, then run the same command, which takes the newest that is left, with a"
        " smaller optimizer.learning_rate or optimizer.max_grad_norm, or with model.dtype='float32'"
    )
