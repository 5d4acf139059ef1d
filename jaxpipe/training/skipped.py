"""Skipped steps, whose loss or gradients are not finite: their report, and the error that ends the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.errors import TrainingError, explain
from jaxpipe.program import Pipeline


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

    def __init__(self, pipeline: Pipeline, *, max_in_row: int):
        """Compiles nothing until a step is skipped.

        Args:
            pipeline: the pipeline of the run.
            max_in_row: number of consecutive skipped steps at which the run ends.
        """
        self._square_sums, self._max_in_row = jax.jit(pipeline.square_sums), max_in_row

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
        raise TrainingError(
            explain(
                f"step {step}: loss or gradients are not finite, {num_in_row} steps in a row",
                rule=f"finite-numbers: a run ends after train.max_skipped_in_row={self._max_in_row} such steps",
                picture=f"{values}\n{culprit}\nparameters and optimizer are as step {last_good} left them",
                repair=f"{_repair(last_good, are_params_bad=are_params_bad)}",
            )
        )

    def _culprit(self, numbers: Mapping[str, float], params: Any) -> tuple[str, bool]:
        """The first parameter that is bad itself, or else whose gradient is; and whether a parameter is bad itself."""
        names, of_params = parameter_names(params), ~np.isfinite(np.asarray(self._square_sums(params)))
        if of_params.any():
            name = names[int(of_params.argmax())]
            return f"first bad parameter: {name}, itself not finite or too large to square", True
        if numbers["bad_parameter"] >= 0:
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
