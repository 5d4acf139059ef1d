"""How many bytes should a training step take of each device, by the schedule and the model alone?

The one place where all kinds stand together; each is counted where it is made: what is held between actions in
`jaxpipe.program.accounting`, what an action needs besides in `workspace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.compile.workspace import workspace_bytes
from jaxpipe.program import Pipeline
from jaxpipe.program.accounting import bytes_per_device, held_bytes

PyTree = Any


@dataclass(frozen=True)
class Prediction:
    """Bytes per device of one training step.

    Attributes:
        state: parameters and optimizer state, updated in place.
        batch: tokens and targets.
        held: what is held between actions, by kind, as `held_bytes` counts.
        workspace: what an action needs besides, by its part; one runs at a time, so the largest counts.
    """

    state: int
    batch: int
    held: dict[str, int]
    workspace: dict[str, int]

    @property
    def temp_bytes(self) -> int:
        """All but the step's arguments."""
        return sum(self.held.values()) + max(self.workspace.values())

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of every kind; `total_bytes` is their sum."""
        return {
            "state": self.state,
            "batch": self.batch,
            **self.held,
            "workspace": max(self.workspace.values()),
        }

    @property
    def total_bytes(self) -> int:
        """All that the step takes."""
        return sum(self.parts.values())


def predict(pipeline: Pipeline, state: PyTree, batch: PyTree, *, has_dropout: bool) -> Prediction:
    """What the step of `pipeline` should take; compiles only the parts of an action, each by itself.

    Args:
        pipeline: whose step it is.
        state: the train state, or its shapes and shardings; has `params`.
        batch: leaves [num_microbatches, microbatch size, ...], likewise.
        has_dropout: whether the step drops anything.
    """
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    return Prediction(
        state=bytes_per_device(state),
        batch=bytes_per_device(batch),
        held=held_bytes(pipeline, state.params, shapes),
        workspace=workspace_bytes(pipeline, state.params, shapes, has_dropout=has_dropout),
    )
