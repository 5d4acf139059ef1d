"""Rules on a head that is split over all devices: S and T of every microbatch stand in every device's row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import View, Violation
from jaxpipe.schedules.schedule import HEAD_KINDS, Action, Kind


def head_everywhere(view: View) -> Iterator[Violation]:
    """Yields head actions that are missing, repeated, or of another stage than the last."""
    schedule, columns = view.schedule, view.columns
    if not schedule.has_head_actions:
        return
    rule, last = "head-everywhere", schedule.num_stages - 1
    is_head = view.in_range & columns.is_kind(*HEAD_KINDS)
    for index in np.flatnonzero(is_head & (columns.stage != last)).tolist():
        action = view.action(index)
        yield Violation(
            rule,
            f"{view.where(index)}: {action} is of stage {action.stage}, and the head follows stage {last}",
            f"write {action._replace(stage=last)}",
            (view.place(index),),
        )
    for kind in sorted(HEAD_KINDS):
        own = np.flatnonzero(is_head & (columns.stage == last) & (columns.kind == kind))
        count = np.zeros((schedule.num_devices, schedule.num_microbatches), int)
        np.add.at(count, (columns.device[own], columns.microbatch[own]), 1)
        for device, microbatch in np.argwhere(count != 1).tolist():
            action = Action(kind, last, microbatch, int(schedule.replica_of_microbatch[microbatch]))
            if count[device, microbatch]:
                index = own[(columns.device[own] == device) & (columns.microbatch[own] == microbatch)][1]
                what, repair = f"{view.where(index)}: {action} stands here again", "remove it"
                place = view.place(int(index))
            else:
                place = device, len(schedule.rows[device])
                what, repair = f"device {device}: {action} is missing", f"add {action} to the row of device {device}"
            yield Violation(rule, what, repair, (place,))


def head_in_order(view: View) -> Iterator[Violation]:
    """Yields every T that comes before the S of its microbatch, and rows with another order of S, or of T."""
    columns = view.columns
    if not view.schedule.has_head_actions:
        return
    for kind in sorted(HEAD_KINDS):
        orders = [[action for action in row if action.kind is kind] for row in view.schedule.rows]
        for device, row in enumerate(orders):
            of_row, of_first = ([action.microbatch for action in order] for order in (row, orders[0]))
            if of_row != of_first and sorted(of_row) == sorted(of_first):
                pairs = zip(row, orders[0], strict=True)
                ours, other = next((a, b) for a, b in pairs if a.microbatch != b.microbatch)
                yield Violation(
                    "head-in-order",
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
                yield Violation(
                    "head-in-order",
                    f"{view.where(index)}: {view.action(index)} comes after {view.action(first[key])} "
                    f"({view.where(first[key])})",
                    f"move it before position {view.place(first[key])[1]}",
                    (view.place(index), view.place(first[key])),
                )
        else:
            first[key] = index
