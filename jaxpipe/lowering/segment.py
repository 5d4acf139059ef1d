"""A run of rounds that the program executes as repetitions of one loop body."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Rounds `start` to `stop`, executed as repetitions of a body of `body_rounds` positions."""

    start: int
    stop: int
    body_rounds: int

    @property
    def num_repetitions(self) -> int:
        """How often the body runs."""
        return (self.stop - self.start) // self.body_rounds
