"""Rules on a second replica of the stages: it mirrors the first, each microbatch runs in one, and SYNC sums both.

A stage's gradients are summed once, when they are complete, with those of the same stage in the other replica.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import BACKWARD_KINDS, GRADIENT_KINDS, NUMBERED_KINDS, Action, Kind


@rule("mirrored", "there are at most two replicas; of two, stage s is on device d and on its partner D-1-d, D even")
def mirrored(view: View) -> Iterator[Breach]:
    """Yields replicas that are more than two, or not mirror images on an even number of devices."""
    placement = view.schedule.placement
    num_devices = placement.num_devices
    num_replicas = placement.num_replicas
    if num_replicas == 1:
        return
    # With more, nothing below has a meaning: a device has one partner.
    if num_replicas > 2:
        yield Breach(f"the placement has num_replicas={num_replicas}", "give one replica, or two")
        return
    if num_devices % 2:
        yield Breach(
            f"num_devices={num_devices} with two replicas: device {num_devices // 2} is its own partner",
            f"give num_devices={num_devices + 1}, or one replica",
        )
    for stage, device in enumerate(placement.devices[0]):
        other = placement.device_of(stage, 1)
        partner = placement.partner_of(device)
        if other != partner:
            yield Breach(
                f"stage {stage} of replica 0 is on device {device}, that of replica 1 on device {other}",
                f"place stage {stage} of replica 1 on device {partner}",
            )


@rule("one-replica", "all actions of a microbatch are of one replica")
def one_replica(view: View) -> Iterator[Breach]:
    """Yields microbatches with actions of several replicas."""
    columns = view.columns
    if view.schedule.num_replicas == 1:
        return
    actions = np.flatnonzero(view.is_placed & columns.is_kind(*NUMBERED_KINDS))
    # microbatch -> its first action, whose replica counts
    first: dict[int, int] = {}
    told: set[int] = set()
    for index in actions.tolist():
        microbatch = int(columns.microbatch[index])
        other = first.setdefault(microbatch, index)
        # One violation for each microbatch: all of its actions would be reported otherwise.
        if columns.replica[index] != columns.replica[other] and microbatch not in told:
            told.add(microbatch)
            ours = columns.replica[index]
            theirs = columns.replica[other]
            yield view.breach(
                index,
                f"is of replica {ours}, but {view.action(other)} ({view.where(other)}) of replica {theirs}",
                f"run every stage of microbatch {microbatch} in replica {theirs}, or every one in replica {ours}",
                other,
            )


@rule("sync-last", "a stage has at most one SYNC, after its last backward")
def sync_last(view: View) -> Iterator[Breach]:
    """Yields SYNCs that come twice or before a backward of their stage."""
    columns = view.columns
    synced: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(view.is_placed & (columns.kind == Kind.SYNC)).tolist():
        action = view.action(index)
        # (stage, replica) -> its first SYNC; a later one is reported as the repeated one.
        earlier = synced.setdefault((action.stage, action.replica), index)
        if earlier != index:
            what = f"stands here again, after {view.where(earlier)}"
            yield view.breach(index, what, f"remove it from {view.where(earlier)}", earlier)
            continue
        same = (columns.stage == action.stage) & (columns.replica == action.replica)
        # Indices rise along a row, and all holders of a stage's replica are one device: the last index is the last in
        # time.
        backward = np.flatnonzero(view.is_placed & same & columns.is_kind(*BACKWARD_KINDS, *GRADIENT_KINDS))
        if len(backward) and (last := int(backward[-1])) > index:
            what = f"comes before {view.action(last)} ({view.where(last)})"
            yield view.breach(index, what, f"move it to after position {view.place(last)[1]}")


@rule(
    "sync-both",
    "of two replicas, either both copies of a stage have a SYNC or neither: their gradients are summed with each "
    "other's",
)
def sync_both(view: View) -> Iterator[Breach]:
    """Yields SYNCs of one copy of a stage where the other copy has none; only with two replicas."""
    columns = view.columns
    placement = view.schedule.placement
    # A SYNC of a single replica has no other half; it sums over `data` alone.
    if placement.num_replicas != 2:
        return
    synced = {
        (int(columns.stage[index]), int(columns.replica[index])): index
        for index in np.flatnonzero(view.is_placed & (columns.kind == Kind.SYNC)).tolist()
    }
    for (stage, replica), index in synced.items():
        if (stage, 1 - replica) in synced:
            continue
        other = Action(Kind.SYNC, stage, replica=1 - replica)
        device = placement.device_of(stage, 1 - replica)
        yield Breach(
            f"{view.where(index)}: {view.action(index)} waits for {other}, which is missing",
            f"add {other} to the row of device {device}, after its last backward of that stage and replica",
            (view.place(index), (device, len(view.schedule.rows[device]))),
        )
