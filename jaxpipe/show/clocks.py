"""A schedule on each clock, as a panel of the page."""

from __future__ import annotations

from jaxpipe.lowering import RoundTable, replay
from jaxpipe.schedules import Costs, Schedule, simulate, stored
from jaxpipe.schedules.analysis.bubbles import held_up
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.render.panel import Panel
from jaxpipe.show.program_memory import program_stored
from jaxpipe.show.program_timeline import held_up_in_rounds, program_timeline

ASYNCHRONOUS = "asynchronous"
PROGRAM = "program"


def asynchronous_panel(schedule: Schedule, costs: Costs) -> Panel:
    """The textbook's clock: every device runs its row as soon as inputs are there."""
    timeline = simulate(schedule, costs)
    return Panel(
        ASYNCHRONOUS,
        timeline,
        message=dependencies(schedule).message,
        held_up=held_up(timeline, costs),
        stored=stored(timeline),
    )


def program_panel(table: RoundTable, costs: Costs) -> Panel:
    """The clock of the compiled program: rounds, in which pairs of devices wait for each other."""
    times = replay(table, costs)
    shown = program_timeline(table, times, costs)
    return Panel(
        PROGRAM,
        shown.timeline,
        message=shown.with_index(table.dependencies.message),
        held_up=shown.with_index(held_up_in_rounds(table, times, costs)),
        stored=program_stored(table, times, costs),
        rounds=shown.rounds,
        round_start=times.start,
    )
