"""The held-out loss: the mean over all terms of the first held-out batches, in nats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxpipe.training.losses import named
from jaxpipe.training.setup import Setup, put_batch


def heldout_losses(
    eval_step: Callable[[Any, Any], Any], setup: Setup, params: Any, *, num_batches: int
) -> dict[str, float]:
    """The held-out loss of staged `params` over at most `num_batches` batches, always the same ones.

    Returns:
        "eval_loss" and, where there are several kinds of loss, each one's own.
    """
    sums, nums = [], []
    for batch in setup.heldout_batches.first(num_batches):
        sums.append(eval_step(params, put_batch(setup.pipeline, batch)))
        nums.append(setup.model.num_losses(batch))
    means = jax.tree.map(lambda total, num: float(total / max(num, 1)), _total(sums), _total(nums))
    return named(means, prefix="eval_")


def _total(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.sum(np.asarray(leaves, np.float64)), *trees)
