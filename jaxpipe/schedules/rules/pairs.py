"""Rules on EVICT, LOAD and SYNC: the exchanges between the two devices of a pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.rules.view import View, Violation
from jaxpipe.schedules.schedule import TRANSFER_KINDS, Action, Kind


def parked_share(view: View) -> Iterator[Violation]:
    """Yields fractions that are not one for each stage, or not above 0 and at most 1."""
    parked, num_stages = view.schedule.parked, view.schedule.num_stages
    if parked and len(parked) != num_stages:
        yield Violation(
            "parked-share",
            f"there are {len(parked)} shares of parked pages for num_stages={num_stages}",
            f"give {num_stages} shares, or none if whole microbatches leave",
        )
    for stage, share in enumerate(parked):
        if not 0 < share <= 1:
            yield Violation("parked-share", f"stage {stage} parks {share} of a microbatch", "set a share in (0, 1]")


def paired(view: View) -> Iterator[Violation]:
    """Yields evictions and loads of a device that is its own partner."""
    middle = view.columns.device == view.schedule.placement.partner_of(view.columns.device)
    for index in np.flatnonzero(view.held & middle & view.columns.is_kind(*TRANSFER_KINDS)).tolist():
        yield Violation(
            "paired",
            f"{view.where(index)}: {view.action(index)} moves activations of device {view.place(index)[0]} to itself",
            f"remove it and its {'LOAD' if view.action(index).kind is Kind.EVICT else 'EVICT'}",
            (view.place(index),),
        )


def evict_load(view: View) -> Iterator[Violation]:
    """Yields evictions, loads and backwards that find the activations elsewhere."""
    columns = view.columns
    is_moved = view.held & columns.is_kind(*TRANSFER_KINDS)
    if not is_moved.any():
        return
    moved = set(zip(columns.stage[is_moved].tolist(), columns.microbatch[is_moved].tolist(), strict=True))
    histories: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in np.flatnonzero(view.held & (columns.kind != Kind.SYNC)).tolist():
        key = (int(columns.stage[index]), int(columns.microbatch[index]))
        if key in moved:
            histories[key].append(index)
    for history in histories.values():
        yield from _evict_load_of_one(view, history)


def _evict_load_of_one(view: View, history: list[int]) -> Iterator[Violation]:
    """Violations in the actions of one (stage, microbatch), in row order."""
    state = "absent"
    for index in history:
        action = view.action(index)
        if action.kind is Kind.F:
            state = "stored"
        elif action.kind in TRANSFER_KINDS:
            needed = "stored" if action.kind is Kind.EVICT else "parked"
            if state != needed:
                other = "the F or LOAD" if action.kind is Kind.EVICT else "the EVICT"
                place = "before the backward" if state == "given back" else f"after {other} that it belongs to"
                yield Violation(
                    "evict-load",
                    f"{view.where(index)}: {action} finds the activations {state}, not {needed}",
                    f"move it to {place}, or remove it",
                    (view.place(index),),
                )
            state = "parked" if action.kind is Kind.EVICT else "stored"
        elif state == "parked":
            load = action._replace(kind=Kind.LOAD)
            yield Violation(
                "evict-load",
                f"{view.where(index)}: {action} needs activations that are still parked",
                f"put {load} before position {view.place(index)[1]}",
                (view.place(index),),
            )
        elif action.kind is not Kind.I:
            state = "given back"


# ---- SYNC: gradients are summed once, when they are complete, with those of the other replica


def sync_last(view: View) -> Iterator[Violation]:
    """Yields SYNCs that come twice or before a backward of their stage."""
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
    """Yields SYNCs of one copy of a stage where the other copy has none; only with two replicas."""
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
