"""The average of a run's weights: where a train state has it, and under which names a checkpoint.

It stands in the state of the optimizer, whose trees like the parameters every mesh, schedule and checkpoint knows.
Left to others: how it moves (`jaxpipe.training.optimizer`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

AVERAGE = "optimizer.average."  # before the path of a parameter, in the names of arrays


class AveragedState(NamedTuple):
    """State of an optimizer whose weights are averaged.

    Attributes:
        average: the average, float32 like the parameters, and sharded as they are.
        inner: the state of the optimizer itself.
    """

    average: Any
    inner: Any


def average_in(optimizer: Any) -> Any:
    """The average in the state of an optimizer, or in its shapes; None: it keeps none."""
    return optimizer.average if isinstance(optimizer, AveragedState) else None
