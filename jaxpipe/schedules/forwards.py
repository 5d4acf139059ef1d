"""The forwards of a schedule, for evaluation: same placement, same order, nothing else."""

from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.schedule import Schedule


def forwards(schedule: Schedule) -> Schedule:
    """Returns `schedule` with only its F actions."""
    rows = tuple(tuple(action for action in row if action.kind == Kind.F) for row in schedule.rows)
    return Schedule(f"{schedule.name} forwards", schedule.placement, schedule.num_microbatches, rows)
