"""SYNC actions: where a device says that the gradients of one of its stages are complete.

In a schedule of two replicas each stage is on two devices, which sum their gradients. No computation waits
for that. How they are summed is for the program.
"""

from __future__ import annotations

from jaxpipe.schedules.action import COMPUTE_KINDS, Action, Kind
from jaxpipe.schedules.phantoms import Rows
from jaxpipe.schedules.placement import Placement


def with_sync(rows: Rows, placement: Placement, *, eager: bool) -> Rows:
    """Returns `rows` with one SYNC for each (replica, stage) that their device holds.

    Args:
        rows: [device][position] -> F, B, I or W.
        placement: of two replicas, which holds the stages of `rows`.
        eager: put each SYNC directly after the last backward of its stage and replica, not all of them at
            the end of the row. A stage whose replica runs no microbatch has its SYNC at the end in any case.

    Example:
        >>> from jaxpipe.schedules.placement import bidirectional, linear
        >>> rows = ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)))
        >>> [str(action) for action in with_sync(rows, bidirectional(linear(2)), eager=True)[0]]
        ['0F0', '0B0', '0SYNC', '1SYNC@1']
    """
    return tuple(_with_sync(row, placement.stages_of[device], eager) for device, row in enumerate(rows))


def _with_sync(row: tuple[Action, ...], held: tuple[tuple[int, int], ...], eager: bool) -> tuple[Action, ...]:
    last: dict[tuple[int, int], int] = {}
    if eager:
        for position, action in enumerate(row):
            if action.kind in COMPUTE_KINDS:
                last[action.replica, action.stage] = position
    syncs = {(replica, stage): Action(Kind.SYNC, stage, replica=replica) for replica, stage in held}
    at_end = tuple(sync for key, sync in syncs.items() if key not in last)
    after = {position: syncs[key] for key, position in last.items()}
    woven: list[Action] = []
    for position, action in enumerate(row):
        woven.append(action)
        if position in after:
            woven.append(after[position])
    return (*woven, *at_end)
