"""The forwards of a schedule alone, as evaluation runs them, in an order that waits no longer than it must.

A method orders its forwards so that backwards fit between them, or so that few activations are stored. Without
backwards nothing is stored, and such an order only waits: V-Min's takes 1.9 times, GEMS's 5.8 times as long as need be
(8 devices, 16 microbatches).

Goes in: a schedule. Comes out: one of its forwards, with its placement.
"""

from __future__ import annotations

from dataclasses import replace

from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.passes.overlap import apart
from jaxpipe.schedules.schedule import HEAD_KINDS, Action, Kind, Rows, Schedule


def forwards_only(schedule: Schedule) -> Schedule:
    """`schedule` with its F actions alone, and S and T if it has any.

    In the method's own order, or, where that makes it shorter on the asynchronous clock, in the order of `_eager`. S
    and T meet on all devices in one order, so that a schedule with them keeps the method's.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> simulate(forwards_only(build("v_min", num_devices=8, num_microbatches=16))).makespan
        46.0
    """
    kept = {Kind.F} | HEAD_KINDS
    rows = tuple(tuple(action for action in row if action.kind in kept) for row in apart(schedule).rows)
    as_ordered = Schedule(f"{schedule.name} forwards", schedule.placement, schedule.num_microbatches, rows)
    if as_ordered.columns.is_kind(*HEAD_KINDS).any():
        return as_ordered
    eager = replace(as_ordered, rows=_eager(as_ordered))
    return min(as_ordered, eager, key=lambda each: simulate(each).makespan)  # of equal ones the first


def _eager(schedule: Schedule) -> Rows:
    """Rows in which a free device runs the F of its last stage that has a message; of a stage in the method's order.

    All F take one tick. A microbatch that is far gone goes first, so that the devices after it do not wait.
    """
    # [device][stage of a replica, the last one first] its F, of which the last is the next.
    waiting: list[list[list[Action]]] = []
    for row, held in zip(schedule.rows, schedule.placement.stages_of, strict=True):
        stages = sorted(((stage, replica) for replica, stage in held), reverse=True)
        waiting.append([[a for a in reversed(row) if (a.stage, a.replica) == stage] for stage in stages])
    num_left = sum(map(len, schedule.rows))
    ended: set[tuple[int, int]] = set()  # (stage, microbatch)
    rows = [[] for _ in schedule.rows]
    while num_left:
        started = []
        for row, of_stages in zip(rows, waiting, strict=True):
            ready = (
                actions
                for actions in of_stages
                if actions and (actions[-1].stage == 0 or (actions[-1].stage - 1, actions[-1].microbatch) in ended)
            )
            if actions := next(ready, None):
                row.append(actions.pop())
                started.append(row[-1])
        ended.update((action.stage, action.microbatch) for action in started)
        num_left -= len(started)
    return tuple(map(tuple, rows))
