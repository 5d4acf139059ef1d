"""Rules on SYNC: gradients are summed once, when they are complete, and with those of the other copy."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.action import Action, Kind
from jaxpipe.schedules.rules.view import View
from jaxpipe.schedules.rules.violation import Violation


def sync_last(view: View) -> Iterator[Violation]:
    """SYNCs that come twice or before a backward of their stage."""
    columns = view.columns
    synced: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(view.held & (columns.kind == Kind.SYNC)).tolist():
        action = view.action(index)
        earlier = synced.setdefault((action.stage, action.replica), index)
        if earlier != index:
            yield Violation(
                "sync-last",
                f"{view.where(index)}: {action} stands here again, after {view.where(earlier)}",
                f"remove it from {view.where(earlier)}",
                (view.place(index), view.place(earlier)),
            )
            continue
        same = (columns.stage == action.stage) & (columns.replica == action.replica)
        backward = np.flatnonzero(view.held & same & columns.is_kind(Kind.B, Kind.I, Kind.W))
        if len(backward) and (last := int(backward[-1])) > index:
            yield Violation(
                "sync-last",
                f"{view.where(index)}: {action} comes before {view.action(last)} ({view.where(last)})",
                f"move it to after position {view.place(last)[1]}",
                (view.place(index),),
            )


def sync_both(view: View) -> Iterator[Violation]:
    """SYNCs of one copy of a stage, where the other one has none; only of two replicas."""
    columns, placement = view.columns, view.schedule.placement
    if placement.num_replicas != 2:
        return
    synced = {
        (int(columns.stage[index]), int(columns.replica[index])): index
        for index in np.flatnonzero(view.held & (columns.kind == Kind.SYNC)).tolist()
    }
    for (stage, replica), index in synced.items():
        if (stage, 1 - replica) in synced:
            continue
        other = Action(Kind.SYNC, stage, replica=1 - replica)
        device = placement.device_of(stage, 1 - replica)
        yield Violation(
            "sync-both",
            f"{view.where(index)}: {view.action(index)} waits for {other}, which is missing",
            f"add {other} to the row of device {device}, after its last backward of that stage and replica",
            (view.place(index), (device, len(view.schedule.rows[device]))),
        )
