"""What the page shows of one schedule on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.activations import Stored
from jaxpipe.schedules.analysis.simulate import Timeline


@dataclass(frozen=True, eq=False)
class Panel:
    """One timeline and what belongs to it; A actions, D devices.

    Attributes:
        clock: its name.
        timeline: of actions and of transfers between paired devices.
        message: [A] the action whose message each one reads, from its own device too; -1 where there is none.
        held_up: [A] the action after which each one started, -1 where it started at 0.
        stored: [D] what each device stores, in slots.
        rounds: [A] the round of each action; None on a clock without rounds.
        round_start: [R, D] when each device begins each round; None on a clock without rounds.
    """

    clock: str
    timeline: Timeline
    message: np.ndarray
    held_up: np.ndarray
    stored: Sequence[Stored]
    rounds: np.ndarray | None = None
    round_start: np.ndarray | None = None
