"""Which checkpoints of a run are kept: the newest, the best, and every so many steps' for good."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Keep:
    """What is kept; the newest checkpoint always is.

    Attributes:
        last: so many of the newest.
        every: and those of every so many steps; 0: none.
        best: and so many of those with the least held-out loss.
    """

    last: int = 3
    every: int = 0
    best: int = 0

    def reasons(self, losses: Mapping[int, float | None]) -> dict[int, list[str]]:
        """Why each checkpoint is kept; those for which nothing speaks may be deleted.

        Args:
            losses: the held-out loss, or None, of each checkpoint, by step.

        Example:
            >>> Keep(last=1, every=20, best=1).reasons({10: 1.5, 20: 2.0, 30: None, 40: 1.75, 50: 2.5})
            {10: ['best 1'], 20: ['every 20'], 30: [], 40: ['every 20'], 50: ['last 1']}
        """
        last = max(self.last, 1)
        newest = sorted(losses)[-last:]
        measured = {step: loss for step, loss in losses.items() if loss is not None and math.isfinite(loss)}
        best = sorted(measured, key=lambda step: (measured[step], -step))[: self.best]
        reasons: dict[int, list[str]] = {step: [] for step in sorted(losses)}
        for step, found in reasons.items():
            if step in newest:
                found.append(f"last {last}")
            if self.every and step % self.every == 0:
                found.append(f"every {self.every}")
            if step in best:
                found.append(f"best {self.best}")
        return reasons
