"""A schedule on one clock, as a panel of the HTML page.

Goes in: a schedule or its round table, and costs. Comes out: all arrays that the panel draws and tells of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.drawing import program_clock
from jaxpipe.drawing.program_clock import program_stored, program_timeline
from jaxpipe.lowering import RoundTable, replay
from jaxpipe.schedules import Costs, Schedule, Stored, Timeline, simulate, stored
from jaxpipe.schedules.analysis.bubbles import critical_predecessors
from jaxpipe.schedules.analysis.dependencies import dependencies

ASYNCHRONOUS = "asynchronous"
PROGRAM = "program"


@dataclass(frozen=True, eq=False)
class Panel:
    """One timeline and what belongs to it; A actions, D devices.

    Attributes:
        clock: ASYNCHRONOUS or PROGRAM.
        timeline: of actions and of transfers between paired devices.
        message: [A] the action whose message each one reads, from its own device too; -1 where there is none.
        critical_predecessor: [A] the action whose end let each one start, -1 where it started at 0.
        stored: [D] what each device stores, in slots.
        rounds: [A] the round of each action; None on a clock without rounds.
        round_start: [R, D] when each device begins each round; None on a clock without rounds.
    """

    clock: str
    timeline: Timeline
    message: np.ndarray
    critical_predecessor: np.ndarray
    stored: Sequence[Stored]
    rounds: np.ndarray | None = None
    round_start: np.ndarray | None = None


def asynchronous_panel(schedule: Schedule, costs: Costs) -> Panel:
    """The textbook's clock: every device runs its next action as soon as the inputs are there."""
    timeline = simulate(schedule, costs)
    return Panel(
        ASYNCHRONOUS,
        timeline,
        message=dependencies(schedule).message,
        critical_predecessor=critical_predecessors(timeline, costs),
        stored=stored(timeline),
    )


def program_panel(table: RoundTable, costs: Costs) -> Panel:
    """The clock of the compiled program: rounds, in which pairs of devices wait for each other."""
    times = replay(table, costs)
    program = program_timeline(table, times, costs)
    return Panel(
        PROGRAM,
        program.timeline,
        message=program.with_index(table.dependencies.message),
        critical_predecessor=program.with_index(program_clock.critical_predecessors(table, times, costs)),
        stored=program_stored(table, times, costs),
        rounds=program.rounds,
        round_start=times.start,
    )
