"""Which orders of the mesh suit a schedule."""

from __future__ import annotations

from jaxpipe.schedules import Schedule


def orders_to_try(schedule: Schedule) -> tuple[str, ...]:
    """What `mesh.order="auto"` tries for `schedule`, the best first."""
    if schedule.num_replicas > 1:
        return ("replicas_together", "pair_adjacent", "contiguous")
    return ("pair_adjacent",) if schedule.has_transfers else ("contiguous",)
