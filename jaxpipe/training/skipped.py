"""Steps that were skipped, because their loss or a gradient was not finite: what is said of them, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.errors import TrainingError
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
    """A step that was skipped.

    Attributes:
        text: what to say of it.
        are_params_bad: whether a parameter is itself not finite or too large to square, so that a checkpoint of them
            is of no use. If not, they are as the last good step left them.
    """

    text: str
    are_params_bad: bool


class SkippedSteps:
    """Looks at every step's metrics, and at the parameters where a step was skipped."""

    def __init__(self, pipeline: Pipeline, *, max_in_row: int):
        """Compiles nothing before a step is skipped.

        Args:
            pipeline: of the run.
            max_in_row: with so many skipped steps one after another the run ends.
        """
        self._square_sums, self._max_in_row = jax.jit(pipeline.square_sums), max_in_row

    def check(self, step: int, numbers: Mapping[str, float], params: Any) -> Skipped | None:
        """What there is to know of a step that was skipped; None of one that was not.

        All processes call it alike, since what they find out of the parameters they find out together.

        Args:
            step: counted from 1.
            numbers: the metrics of `make_train_step`, as numbers.
            params: staged, as the step left them.

        Raises:
            TrainingError: the step is one too many in a row.
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
            f"step {step}: loss or gradients are not finite, {num_in_row} steps in a row\n"
            f"  rule finite-numbers: a run ends after train.max_skipped_in_row={self._max_in_row} such steps\n"
            f"      {values}\n"
            f"      {culprit}\n"
            f"      parameters and optimizer are as step {last_good} left them\n"
            f"  repair: {_repair(last_good, are_params_bad=are_params_bad)}"
        )

    def _culprit(self, numbers: Mapping[str, float], params: Any) -> tuple[str, bool]:
        """Which parameter is bad in itself, or the first of those whose gradients are; and whether one is itself."""
        names, of_params = parameter_names(params), ~np.isfinite(np.asarray(self._square_sums(params)))
        if of_params.any():
            name = names[int(of_params.argmax())]
            return f"first bad parameter: {name}, itself not finite or too large to square", True
        if numbers["bad_parameter"] >= 0:
            return f"first bad parameter: {names[int(numbers['bad_parameter'])]}, by its gradient", False
        return "the gradient of every parameter is finite", False


def _repair(last_good: int, *, are_params_bad: bool) -> str:
    """How to go on where the parameters are as step `last_good` left them."""
    if are_params_bad and last_good == 0:
        return "the run began with these parameters: name another checkpoint.init_from"
    away = (
        f"{CHECKPOINTS}/{last_good}, if it is there, holds these parameters: move it"
        if are_params_bad
        else f"go on from before the trouble: move the newest folders of {CHECKPOINTS}/"
    )
    return (
        f"{away} out of the run's folder, then give the same command, which takes the newest that is left, with a"
        " smaller optimizer.learning_rate or optimizer.max_grad_norm, or with model.dtype='float32'"
    )
