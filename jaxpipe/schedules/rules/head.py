"""Rules on a head that is split over all devices: S and T of every microbatch stand in every device's row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import HEAD_KINDS, Action, Kind


@rule(
    "head-everywhere",
    "if any row has an S or T, every row has one S and one T of the last stage for each microbatch",
)
def head_everywhere(view: View) -> Iterator[Breach]:
    """Yields head actions that are missing, repeated, or of another stage than the last."""
    schedule = view.schedule
    columns = view.columns
    if not schedule.has_head_actions:
        return
    last = schedule.num_stages - 1
    is_head = view.in_range & columns.is_kind(*HEAD_KINDS)
    for index in np.flatnonzero(is_head & (columns.stage != last)).tolist():
        action = view.action(index)
        what = f"is of stage {action.stage}, and the head follows stage {last}"
        yield view.breach(index, what, f"write {action._replace(stage=last)}")
    for kind in sorted(HEAD_KINDS):
        actions = np.flatnonzero(is_head & (columns.stage == last) & (columns.kind == kind))
        count = np.zeros((schedule.num_devices, schedule.num_microbatches), int)
        # `count[...] += 1` would count a repeated action once.
        np.add.at(count, (columns.device[actions], columns.microbatch[actions]), 1)
        for device, microbatch in np.argwhere(count != 1).tolist():
            same = actions[(columns.device[actions] == device) & (columns.microbatch[actions] == microbatch)]
            if len(same):
                yield view.repeated(*same[:2].tolist())
            else:
                replica = int(schedule.replica_of_microbatch[microbatch])
                yield view.missing(Action(kind, last, microbatch, replica), device)


@rule(
    "head-in-order",
    "on a device, the S of a microbatch precedes its T; the S of all rows are in one order, and so are the T",
)
def head_in_order(view: View) -> Iterator[Breach]:
    """Yields every T that comes before the S of its microbatch, and rows with another order of S, or of T."""
    columns = view.columns
    if not view.schedule.has_head_actions:
        return
    for kind in sorted(HEAD_KINDS):
        orders = [[action for action in row if action.kind is kind] for row in view.schedule.rows]
        for device, row in enumerate(orders):
            of_row, of_first = ([action.microbatch for action in order] for order in (row, orders[0]))
            # Rows that lack an action, or have it twice, break head-everywhere, and no order of theirs helps.
            if of_row != of_first and sorted(of_row) == sorted(of_first):
                pairs = zip(row, orders[0], strict=True)
                ours, other = next((a, b) for a, b in pairs if a.microbatch != b.microbatch)
                yield Breach(
                    f"device {device}: {ours} is where device 0 has {other}; all devices meet for each of them",
                    f"put the {kind.name} of all rows in one order",
                    ((device, view.schedule.rows[device].index(ours)),),
                )
    is_head = view.in_range & columns.is_kind(*HEAD_KINDS)
    first: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(is_head).tolist():
        key = int(columns.device[index]), int(columns.microbatch[index])
        if columns.kind[index] == Kind.S:
            if key in first:
                what = f"comes after {view.action(first[key])} ({view.where(first[key])})"
                yield view.breach(index, what, f"move it before position {view.place(first[key])[1]}", first[key])
        else:
            first[key] = index
