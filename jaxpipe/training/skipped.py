"""Steps that were skipped, because their loss or a gradient was not finite: what is said of them, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

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


class SkippedSteps:
    """Looks at every step's metrics, and at the parameters where a step was skipped."""

    def __init__(self, pipeline: Pipeline, *, max_in_row: int):
        """Compiles nothing before a step is skipped.

        Args:
            pipeline: of the run.
            max_in_row: with so many skipped steps one after another the run ends.
        """
        self._square_sums, self._max_in_row = jax.jit(pipeline.square_sums), max_in_row

    def check(self, step: int, numbers: Mapping[str, float], params: Any) -> str | None:
        """What to say of a step that was skipped; None of one that was not.

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
        culprit = self._culprit(numbers, params)
        if num_in_row < self._max_in_row:
            return f"step {step}: skipped, {num_in_row} in a row; {values}; {culprit}"
        raise TrainingError(
            f"step {step}: loss or gradients are not finite, {num_in_row} steps in a row\n"
            f"  rule finite-numbers: a run ends after train.max_skipped_in_row={self._max_in_row} such steps\n"
            f"      {values}\n"
            f"      {culprit}\n"
            f"      parameters and optimizer are as step {step - num_in_row} left them\n"
            "  repair: go on from an earlier checkpoint with a smaller optimizer.learning_rate or"
            " optimizer.max_grad_norm, a larger optimizer.warmup_fraction, or model.dtype='float32'"
        )

    def _culprit(self, numbers: Mapping[str, float], params: Any) -> str:
        """Which parameter is bad in itself, or the first of those whose gradients are."""
        names, of_params = parameter_names(params), ~np.isfinite(np.asarray(self._square_sums(params)))
        if of_params.any():
            return f"first bad parameter: {names[int(of_params.argmax())]}, itself not finite or too large to square"
        if numbers["bad_parameter"] >= 0:
            return f"first bad parameter: {names[int(numbers['bad_parameter'])]}, by its gradient"
        return "the gradient of every parameter is finite"
