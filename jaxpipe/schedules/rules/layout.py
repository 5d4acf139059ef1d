"""Rules on the grid: rows, placement, range, holder."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import NO_MICROBATCH, TRAITS

_MOST_MISSING = 1_000_000  # microbatches without an action that later rules would still list one by one


@rule(
    "row-per-device",
    "a schedule has one row for each of its devices, at least one device and microbatch, an action of each "
    "microbatch, and a microbatch of each batch",
)
def row_per_device(view: View) -> Iterator[Breach]:
    """Yields counts that are below one or do not agree."""
    schedule = view.schedule
    num_devices = schedule.placement.num_devices
    num_rows = len(schedule.rows)
    if num_rows != num_devices or num_devices < 1:
        yield Breach(
            f"num_devices={num_devices}, but num_rows={num_rows}",
            f"set num_devices to the number of rows, {max(num_rows, 1)}; a device that does nothing has an empty row",
        )
    if schedule.num_microbatches < 1:
        yield Breach(f"num_microbatches={schedule.num_microbatches}", "set num_microbatches=1 or more")
    if schedule.num_batches > max(schedule.num_microbatches, 1):
        yield Breach(
            f"num_batches={schedule.num_batches} of num_microbatches={schedule.num_microbatches}",
            "give each batch a microbatch or more",
        )
    num_actions = sum(map(len, schedule.rows))
    # Later rules count the actions of each microbatch, and would say it of every one.
    if schedule.num_microbatches > max(num_actions, _MOST_MISSING):
        yield Breach(
            f"num_microbatches={schedule.num_microbatches}, but the rows have {num_actions} actions",
            "set num_microbatches to the number of microbatches in the rows",
        )


@rule("placement", "each replica has the same stages, and every device holds equally many of them")
def placement(view: View) -> Iterator[Breach]:
    """Yields replicas whose stages are outside the devices, unequal in number or unevenly spread."""
    num_devices = view.schedule.placement.num_devices
    replicas = view.schedule.placement.devices
    if not replicas:
        yield Breach("the placement has num_replicas=0", "give the device of every stage")
    for replica, devices in enumerate(replicas):
        where = f"replica {replica}"
        outside = [stage for stage, device in enumerate(devices) if not 0 <= device < num_devices]
        if outside:
            stage = outside[0]
            device = devices[stage]
            # Only the first stage outside: the others are usually off by the same number.
            nearest = min(max(device, 0), num_devices - 1)
            yield Breach(
                f"{where}: stage {stage} is on device={device}, outside 0..{num_devices - 1}",
                f"place it on a device that exists; the nearest is device={nearest}",
            )
            continue
        if len(devices) != len(replicas[0]):
            yield Breach(
                f"{where} has num_stages={len(devices)}, replica 0 has num_stages={len(replicas[0])}",
                f"give replica {replica} num_stages={len(replicas[0])}",
            )
            continue
        counts = np.bincount(np.array(devices, dtype=int), minlength=num_devices)
        # `not len`: a replica without stages is spread evenly, and still wrong.
        if counts.min() != counts.max() or not len(devices):
            yield Breach(
                f"{where}: device {counts.argmin()} holds {counts.min()} of {len(devices)} stages, "
                f"device {counts.argmax()} holds {counts.max()}",
                f"use a multiple of num_devices={num_devices} stages and spread them evenly",
            )


@rule("range", "stage, replica and microbatch of an action are among those that the schedule has")
def range_(view: View) -> Iterator[Breach]:
    """Yields actions of a stage, replica or microbatch that the schedule does not have."""
    schedule = view.schedule
    limits = {
        "stage": schedule.num_stages,
        "replica": schedule.num_replicas,
        "microbatch": schedule.num_microbatches,
    }
    for index in np.flatnonzero(~view.in_range).tolist():
        action = view.action(index)
        kind = action.kind.name
        traits = TRAITS[action.kind]
        for field, limit in limits.items():
            value = getattr(action, field)
            if field == "microbatch" and traits.whole_batch:
                field = "batch"
                limit = schedule.num_batches
            if field == "microbatch" and not traits.numbered:
                if value != NO_MICROBATCH:
                    what = f"{field}={value}, but {kind} is of no microbatch"
                    repair = f"write {action.stage}{kind}"
                    break
            elif not 0 <= value < limit:
                what = f"{field}={value}, outside 0..{limit - 1}"
                repair = f"remove it, or use the nearest {field}={min(max(value, 0), limit - 1)}"
                if field == "batch" and not schedule.delays:
                    repair = "say the delays of the stages and the number of batches; or remove it"
                break
        else:
            # `in_range` and this loop state the same limits; they must not drift apart.
            raise AssertionError(f"{action} is in range")
        yield view.breach(index, f"has {what}", repair)


@rule("holder", "an action stands in the row of the device that holds its stage of its replica")
def holder(view: View) -> Iterator[Breach]:
    """Yields actions in the row of a device that does not hold their stage."""
    placement = view.schedule.placement
    for index in np.flatnonzero(view.in_range & ~view.is_placed).tolist():
        action = view.action(index)
        device = view.columns.device[index]
        holder = placement.device_of(action.stage, action.replica)
        repair = f"move it to device {holder}"
        for replica in range(placement.num_replicas):
            # Perhaps the row is right, and the replica is not.
            if placement.device_of(action.stage, replica) == device:
                repair += f", or write {action._replace(replica=replica)}"
        what = f"is of stage {action.stage}, replica {action.replica}, which device {holder} holds"
        yield view.breach(index, what, repair)
