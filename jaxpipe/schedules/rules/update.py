"""Rules on schedules of several batches: each stage updates its weights after each batch, and in time for the next."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import GRADIENT_KINDS, Action, Kind


@rule(
    "batches",
    "a schedule with UPDATE has a delay for each stage, equally many microbatches a batch, and one replica",
)
def batches_(view: View) -> Iterator[Breach]:
    """Yields batches and delays that do not fit the other counts of the schedule."""
    schedule = view.schedule
    has_update = bool(view.columns.is_kind(Kind.UPDATE).any())
    if not (schedule.delays or has_update or schedule.num_batches != 1):
        return
    if len(schedule.delays) != schedule.num_stages or min(schedule.delays, default=0) < 0:
        what = f"delays={schedule.delays} for num_stages={schedule.num_stages}"
        yield Breach(what, "give a delay of 0 or more for each stage")
    if schedule.num_batches < 1 or schedule.num_microbatches % max(schedule.num_batches, 1):
        what = f"num_microbatches={schedule.num_microbatches} in num_batches={schedule.num_batches}"
        yield Breach(what, "give each batch equally many microbatches")
    if schedule.num_replicas > 1:
        yield Breach(f"UPDATE with num_replicas={schedule.num_replicas}", "use one replica")


@rule("update-once", "after each batch, each stage has one UPDATE of the batch")
def update_once(view: View) -> Iterator[Breach]:
    """Yields stages that do not update once after each batch."""
    if not _has_batches(view):
        return
    schedule = view.schedule
    columns = view.columns
    updates = np.flatnonzero(view.is_placed & (columns.kind == Kind.UPDATE))
    count = np.zeros((schedule.num_stages, schedule.num_batches), int)
    np.add.at(count, (columns.stage[updates], columns.microbatch[updates]), 1)  # `count[...] += 1` counts doubles once
    for stage, batch in np.argwhere(count != 1).tolist():
        same = updates[(columns.stage[updates] == stage) & (columns.microbatch[updates] == batch)]
        if len(same):
            yield view.repeated(*same[:2].tolist())
        else:
            device = schedule.placement.device_of(stage, 0)
            after = f", after its last backward of batch {batch}"
            yield view.missing(Action(Kind.UPDATE, stage, batch), device, after=after)


@rule(
    "update-in-time",
    "on a device, the actions of batch k precede UPDATE k of their stage and, since they use W(k-d), follow "
    "UPDATE k-d-1, which makes it; backwards of batch k follow UPDATE k-1, since a stage has one sum of gradients",
)
def update_in_time(view: View) -> Iterator[Breach]:
    """Yields actions that stand on the wrong side of an UPDATE of their stage."""
    if not _has_batches(view):
        return
    schedule = view.schedule
    columns = view.columns
    placed = np.flatnonzero(view.is_placed)
    of_stage = {stage: placed[columns.stage[placed] == stage] for stage in range(schedule.num_stages)}
    for stage, delay in enumerate(schedule.delays):
        actions = of_stage[stage]
        is_update = columns.kind[actions] == Kind.UPDATE
        microbatch = columns.microbatch[actions]
        batch = np.where(is_update, microbatch, microbatch // schedule.batch_size)
        place = np.full(schedule.num_batches, -1)  # -1: missing, which `update_once` reports
        place[batch[is_update]] = actions[is_update]
        for index, k in zip(actions[~is_update].tolist(), batch[~is_update].tolist(), strict=True):
            # UPDATE k ends the life of W(k-d) and makes W(k+1): batch k is done before, and batch k+d+1 begins after.
            # UPDATE k reads and empties the stage's one sum of gradients, to which backwards of batch k+1 add after it.
            sides = [
                (k, True, f"it is of batch {k}, whose gradient is then complete"),
                (k - delay - 1, False, f"it uses W({k - delay}), which this makes"),
            ]
            if columns.kind[index] in GRADIENT_KINDS and delay:  # without delay the second side says the same
                sides.append((k - 1, False, f"this reads the sum of gradients of batch {k - 1} alone"))
            for update, is_before, why in sides:
                if update < 0 or place[update] < 0 or (index < place[update]) == is_before:
                    continue
                side = "before" if is_before else "after"
                made = view.action(int(place[update]))
                what = f"does not stand {side} {made} ({view.where(int(place[update]))}): {why}"
                repair = f"move {made} {'after' if is_before else 'before'} it"
                yield view.breach(index, what, repair, int(place[update]))


def _has_batches(view: View) -> bool:
    """Whether the schedule has several batches, and all that `batches_` asks for."""
    return bool(view.schedule.delays) and not any(batches_.broken(view))
