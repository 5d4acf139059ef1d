"""The makespan of the compiled program, as a clock that a schedule is judged by."""

from jaxpipe.lowering.lower import lower
from jaxpipe.lowering.replay import replay
from jaxpipe.schedules import Costs, Schedule


def spmd_makespan(schedule: Schedule, costs: Costs) -> float:
    """The makespan of `schedule` lowered for `costs`, of stages, and run at them: a `clock` for `optimize`."""
    return replay(lower(schedule, costs=costs), costs).makespan
