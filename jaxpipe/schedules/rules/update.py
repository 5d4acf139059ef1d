"""Rules on schedules of several batches: each stage updates its weights after each batch, and in time for the next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import View, Violation
from jaxpipe.schedules.schedule import Action, Kind


def batches_(view: View) -> Iterator[Violation]:
    """Yields batches and delays that do not fit the other counts of the schedule."""
    schedule, rule = view.schedule, "batches"
    has_update = bool(view.columns.is_kind(Kind.UPDATE).any())
    if not (schedule.delays or has_update or schedule.num_batches != 1):
        return
    if len(schedule.delays) != schedule.num_stages or min(schedule.delays, default=0) < 0:
        what = f"delays={schedule.delays} for num_stages={schedule.num_stages}"
        yield Violation(rule, what, "give a delay of 0 or more for each stage")
    if schedule.num_batches < 1 or schedule.num_microbatches % max(schedule.num_batches, 1):
        what = f"num_microbatches={schedule.num_microbatches} in num_batches={schedule.num_batches}"
        yield Violation(rule, what, "give each batch equally many microbatches")
    if schedule.num_replicas > 1:
        yield Violation(rule, f"UPDATE with num_replicas={schedule.num_replicas}", "use one replica")


def update_once(view: View) -> Iterator[Violation]:
    """Yields stages that do not update once after each batch."""
    schedule, columns = view.schedule, view.columns
    if not _has_batches(view):
        return
    own = np.flatnonzero(view.held & (columns.kind == Kind.UPDATE))
    count = np.zeros((schedule.num_stages, schedule.num_batches), int)
    np.add.at(count, (columns.stage[own], columns.microbatch[own]), 1)
    for stage, batch in np.argwhere(count != 1).tolist():
        action, device = Action(Kind.UPDATE, stage, batch), schedule.placement.device_of(stage, 0)
        if count[stage, batch]:
            second = own[(columns.stage[own] == stage) & (columns.microbatch[own] == batch)][1]
            yield Violation(
                "update-once",
                f"{view.where(second)}: {action} stands here again",
                "remove it",
                (view.place(int(second)),),
            )
        else:
            repair = f"add {action} to the row of device {device}, after its last backward of batch {batch}"
            what = f"device {device}: {action} is missing"
            yield Violation("update-once", what, repair, ((device, len(schedule.rows[device])),))


def update_in_time(view: View) -> Iterator[Violation]:
    """Yields actions that stand on the wrong side of an UPDATE of their stage."""
    schedule, columns = view.schedule, view.columns
    if not _has_batches(view):
        return
    held = np.flatnonzero(view.held)
    of_stage = {stage: held[columns.stage[held] == stage] for stage in range(schedule.num_stages)}
    for stage, delay in enumerate(schedule.delays):
        own = of_stage[stage]
        is_update = columns.kind[own] == Kind.UPDATE
        batch = np.where(is_update, columns.microbatch[own], columns.microbatch[own] // schedule.batch_size)
        place = np.full(schedule.num_batches, -1)
        place[batch[is_update]] = own[is_update]
        for index, k in zip(own[~is_update].tolist(), batch[~is_update].tolist(), strict=True):
            # UPDATE k ends the life of W(k-d) and makes W(k+1): batch k is done before, and batch k+d+1 begins after.
            # It reads and empties the stage's one sum of gradients, to which backwards of batch k+1 add after it.
            sides = [
                (k, True, f"it is of batch {k}, whose gradient is then complete"),
                (k - delay - 1, False, f"it uses W({k - delay}), which this makes"),
            ]
            if columns.kind[index] in (Kind.B, Kind.W) and delay:
                sides.append((k - 1, False, f"this reads the sum of gradients of batch {k - 1} alone"))
            for update, is_before, why in sides:
                if update < 0 or place[update] < 0 or (index < place[update]) == is_before:
                    continue
                side = "before" if is_before else "after"
                made = view.action(int(place[update]))
                yield Violation(
                    "update-in-time",
                    f"{view.where(index)}: {view.action(index)} does not stand {side} {made} "
                    f"({view.where(int(place[update]))}): {why}",
                    f"move {made} {'after' if is_before else 'before'} it",
                    (view.place(index), view.place(int(place[update]))),
                )


def _has_batches(view: View) -> bool:
    """Whether the schedule has several batches, and all that `batches_` asks for."""
    return bool(view.schedule.delays) and not any(batches_(view))
