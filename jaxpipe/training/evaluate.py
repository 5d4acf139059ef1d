"""The held-out loss: the mean over the valid tokens of the first held-out batches, in nats per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpipe.data import Batches
from jaxpipe.program import Pipeline
from jaxpipe.training.setup import put_batch


def heldout_loss(
    eval_step: Callable[[Any, Any], Any], pipeline: Pipeline, params: Any, batches: Batches, *, num_batches: int
) -> float:
    """The held-out loss of staged `params` over at most `num_batches` batches, always the same ones."""
    total, num_valid = 0.0, 0
    for batch in batches.first(num_batches):
        total += float(eval_step(params, put_batch(pipeline, batch)))
        num_valid += int((batch["targets"] >= 0).sum())
    return total / num_valid
